"""Reads the few numbers of a GGUF file that an estimate needs, from its first bytes and with no trust in them.

The engine checks the whole header before it loads (``engines/llama_cpp/header.py``); here a nonsense costs an estimate.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

_PREFIX = 64 * 1024
"""Bytes. Writers put an architecture's numbers before the vocabulary, which is what makes a header long."""
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_ARRAY = 1024


def read_numbers(path: Path) -> dict[str, Any]:
    """Integers, and lists of them, by their key without the architecture's name. What cannot be read is left out."""
    found: dict[str, Any] = {}
    try:
        if not path.is_file():
            return found  # a pipe would be waited for
        with path.open("rb") as file:
            data = file.read(_PREFIX)
        magic, _, _, keys = struct.unpack_from("<4sIQQ", data)
        at = 24
        for _ in range(keys if magic == b"GGUF" else 0):
            name, at = _text(data, at)
            (kind,) = struct.unpack_from("<I", data, at)
            value, at = _value(data, at + 4, kind)
            if isinstance(value, (int, list)):
                found[name.partition(".")[2]] = value
    except (OSError, struct.error, ValueError):
        pass  # the prefix ends in the middle of something, as most do
    return found


def _text(data: bytes, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    end = at + 8 + length
    if end > len(data):
        raise ValueError("past the prefix")
    return data[at + 8 : end].decode("utf-8", "replace"), end


def _value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind == _STRING:
        return _text(data, at)
    if kind == _ARRAY:
        inner, count = struct.unpack_from("<IQ", data, at)
        if count > _MAX_ARRAY or inner == _ARRAY:
            raise ValueError("a long array: the vocabulary has begun")  # arrays of arrays, no writer makes
        at += 12
        values = []
        for _ in range(count):
            value, at = _value(data, at, inner)
            values.append(value)
        return values, at
    if kind not in _SCALARS:
        raise ValueError("no such type")
    (value,) = struct.unpack_from(_SCALARS[kind], data, at)
    return value, at + struct.calcsize(_SCALARS[kind])
