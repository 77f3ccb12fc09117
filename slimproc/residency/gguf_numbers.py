"""Reads the few numbers of a GGUF file that an estimate needs, from its first bytes and with no trust in them.

The engine checks the whole header before it loads (``engines/llama_cpp/header.py``); here a nonsense costs an estimate.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from slimproc.gguf import GgufReader

_PREFIX = 64 * 1024
"""Bytes. Writers put an architecture's numbers before the vocabulary, which is what makes a header long."""


def read_numbers(path: Path) -> dict[str, Any]:
    """Integers, and lists of them, by their key without the architecture's name. What cannot be read is left out."""
    found: dict[str, Any] = {}
    try:
        if not path.is_file():
            return found  # a pipe would be waited for
        with path.open("rb") as file:
            data = file.read(_PREFIX)
        magic, _, _, keys = struct.unpack_from("<4sIQQ", data)
        reader = GgufReader(data)
        for _ in range(keys if magic == b"GGUF" else 0):
            name = reader.text()
            value = reader.value(reader.scalar("<I"))
            if isinstance(value, (int, list)):
                found[name.partition(".")[2]] = value
    except (OSError, struct.error, ValueError, OverflowError):
        pass  # the prefix ends in the middle of something, as most do
    return found
