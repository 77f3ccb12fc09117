"""What a file may be that was taken for a model: downloads that went wrong, and other formats. Pure."""

from __future__ import annotations

import struct

_BEGINNINGS = [
    (b"version https://git-lfs", "a Git LFS pointer: the model itself was never downloaded (git lfs pull)"),
    (b"/annex/objects/", "a git-annex pointer: the model itself was never fetched (git annex get)"),
    (b"PK\x03\x04", "a zip archive or PyTorch's weights, not a GGUF file"),
    (b"\x1f\x8b", "compressed with gzip: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd: unpack it first"),
    (b"\x80\x02", "a Python pickle, not a GGUF file"),
    (b"tjgg", "in a format older than GGUF, which llama.cpp no longer reads"),
    (b"fmgg", "in a format older than GGUF, which llama.cpp no longer reads"),
    (b"lmgg", "in a format older than GGUF, which llama.cpp no longer reads"),
]
_PAGES = (b"<!doctype", b"<html", b"<?xml")
_ERROR = (b"{", b"[", b"Entry not found", b"Access to model", b"Invalid username")


def foreign_kind(start: bytes) -> str | None:
    """What a file with the beginning ``start`` is; None when that is not known."""
    for beginning, kind in _BEGINNINGS:
        if start.startswith(beginning):
            return kind
    if start.lstrip()[:15].lower().startswith(_PAGES):
        return "a web page, not a model: the download went wrong"
    if _is_safetensors(start):
        return "a safetensors file, not a GGUF file: convert it, or serve its directory with the mlx backend"
    if start.lstrip().startswith(_ERROR):
        return "a text, not a model: the download went wrong, or the path means another file"
    return None


def _is_safetensors(start: bytes) -> bool:
    """The length of a JSON object, and then the object."""
    return len(start) > 9 and start[8:9] == b"{" and struct.unpack_from("<Q", start)[0] < 1 << 40
