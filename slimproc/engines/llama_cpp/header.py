"""Reads a GGUF file's header before native code does, so that a wrong file is refused in one clear line.

Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md. Nothing here knows what a model is; llama.cpp judges that.
"""

from __future__ import annotations

import math
import mmap
import re
import stat
import struct
from pathlib import Path
from typing import Any, NamedTuple

from slimproc.engines.llama_cpp.foreign import foreign_kind
from slimproc.errors import LoadFailed
from slimproc.gguf import KEYS_AT, GgufReader

_MAX_COUNT = 1 << 24
"""No model has that many tensors or keys; a larger count is a broken file."""
_SHARD = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")

TENSOR_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2),
    34: (256, 54), 35: (256, 66), 39: (32, 17),
}  # fmt: skip
"""Elements and bytes of one block, by tensor type. A type that is not here is not checked for its size."""


class Tensor(NamedTuple):
    """``shape``: the fastest dimension first, as GGUF has it. ``kind``: ggml's number of its type."""

    shape: tuple[int, ...]
    kind: int


class Header(NamedTuple):
    """What a file says before its data. ``needed``: bytes that the file must have for its tensors."""

    values: dict[str, Any]
    """Its keys; None for an array too long to be kept."""
    tensors: dict[str, Tensor]
    lengths: dict[str, int]
    """Of those arrays that were too long."""
    needed: int


def check_file(path: Path) -> Header:
    """The header of the model at ``path``, with the tensors of all its shards, once each of them looks whole.

    Raises LoadFailed (permanent) for what is not there, cannot be read, is not GGUF, or is shorter than it says.
    """
    header = read_header(path)
    count, number = _split(header)
    if count > 1:
        if number != 0:
            raise refusal(f"{path} is shard {number + 1} of {count}: give the path of the first one")
        for place, shard in enumerate(_other_shards(path, count), 1):
            other = read_header(shard)
            if _split(other) != (count, place):
                raise refusal(f"{shard} is named like shard {place + 1} of {count}, and its header says otherwise")
            header.tensors.update(other.tensors)
    return header


def _split(header: Header) -> tuple[int, int]:
    """How many shards, and which of them this is, from 0; (0, 0) for a file that is whole."""
    count, number = header.values.get("split.count", 0), header.values.get("split.no", 0)
    return (count, number) if isinstance(count, int) and isinstance(number, int) else (0, 0)


def _other_shards(path: Path, count: int) -> list[Path]:
    """Shards lie beside the path as it was given: a cache's symlinks lead to files named by hashes."""
    match = _SHARD.match(path.name)
    if match is None or int(match[2]) != 1 or int(match[3]) != count:
        raise refusal(f"{path} is the first of {count} shards but is not named like it (…-00001-of-{count:05}.gguf)")
    shards = [path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf") for number in range(2, count + 1)]
    for number, shard in enumerate(shards, 2):
        if not shard.exists():
            raise refusal(f"shard {number} of {count} is missing: {shard}")
    return shards


def read_header(path: Path) -> Header:
    """Of one file. Raises as ``check_file``."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise refusal(f"{path} is a directory, not a GGUF file")
        if not stat.S_ISREG(mode):
            raise refusal(f"{path} is not a file")
        with path.open("rb") as file:
            start = file.read(512)
            _check_start(path, start)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _parse(path, data)
                size = len(data)
    except FileNotFoundError:
        raise refusal(f"no such file: {path}") from None
    except OSError as error:
        raise refusal(f"{path} cannot be read: {error.strerror}") from error
    if size < header.needed:
        raise refusal(f"{path} is shorter than its tensors say: it has {size} bytes and needs {header.needed}")
    return header


def _check_start(path: Path, start: bytes) -> None:
    if not start:
        raise refusal(f"{path} is empty")
    if start[:4] != b"GGUF":
        kind = foreign_kind(start)
        if kind is not None:
            raise refusal(f"{path} is {kind}")
        raise refusal(f"{path} is not a GGUF file (it begins with {start[:4]!r})")
    if len(start) < KEYS_AT:
        raise refusal(f"{path} is cut off in its header")
    version, tensors, keys = struct.unpack_from("<IQQ", start, 4)
    if version in {2 << 24, 3 << 24}:
        raise refusal(f"{path} was written for a big-endian machine")
    if version not in {2, 3}:
        raise refusal(f"{path} has GGUF version {version}; versions 2 and 3 can be read")
    if tensors > _MAX_COUNT or keys > _MAX_COUNT:
        raise refusal(f"{path} is broken: its header claims {tensors} tensors and {keys} keys")


def _parse(path: Path, data: mmap.mmap) -> Header:
    reader = _Reader(data)
    _, tensors, keys = struct.unpack_from("<IQQ", data, 4)
    try:
        values = {(name := reader.text()): reader.value(reader.scalar("<I"), name) for _ in range(keys)}
        found = [reader.tensor() for _ in range(tensors)]
    except (struct.error, IndexError, OverflowError):
        raise refusal(f"{path} is cut off or broken in its header (at byte {reader.at} of {len(data)})") from None
    except ValueError as error:
        raise refusal(f"{path} is broken: {error}") from None
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise refusal(f"{path} is broken: its alignment is {alignment!r}")
    begin = -(-reader.at // alignment) * alignment
    needed = begin + max(end for _, _, end in found) if found else 0
    return Header(values, {name: tensor for name, tensor, _ in found}, reader.lengths, needed)


class _Reader(GgufReader):
    """Also over the tensors, which come after the keys."""

    def tensor(self) -> tuple[str, Tensor, int]:
        """The next tensor's name, what it is, and where its data end, in bytes from the beginning of all data."""
        name, dimensions = self.text(), self.scalar("<I")
        if dimensions > 4:
            raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self.scalar("<q") for _ in range(dimensions))
        kind, offset = self.scalar("<I"), self.scalar("<Q")
        if min(shape, default=0) < 0:
            raise ValueError(f"tensor {name!r} has a negative size")
        block, size = TENSOR_BLOCKS.get(kind, (1, 0))
        return name, Tensor(shape, kind), int(offset) + -(-math.prod(shape) // block) * size


def refusal(message: str) -> LoadFailed:
    return LoadFailed(message, permanent=True)
