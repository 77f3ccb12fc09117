"""Walks over the keys of a GGUF file, and trusts none of its numbers. Who reads it says what they mean.

Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md. A leaf of its own, because the engine that checks a file and
the front that estimates what it needs both read it, and neither may import the other.
"""

from __future__ import annotations

import mmap
import struct
from typing import Any, Final

KEYS_AT: Final = 24
"""Bytes before the first key: magic, version, the number of tensors and that of keys."""
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_KEPT_ARRAY = 1024
"""Longer arrays (a vocabulary) are stepped over: their values are read by llama.cpp."""


class GgufReader:
    """Walks over ``data``, from the first key on. Leaves its bounds with struct.error, and nonsense with ValueError."""

    def __init__(self, data: bytes | mmap.mmap) -> None:
        self._data = data
        self.at = KEYS_AT
        self.lengths: dict[str, int] = {}
        """Of arrays that were stepped over, by their key."""

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self._data, self.at)
        self.at += struct.calcsize(code)
        return value

    def text(self) -> str:
        length = self.scalar("<Q")
        end = self._within(length)
        text = self._data[self.at : end].decode("utf-8", "replace")
        self.at = end
        return text

    def value(self, kind: int, name: str = "") -> Any:
        """A value of type ``kind``; None for an array too long to be kept, whose length is noted under ``name``."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(name)
        if kind not in _SCALARS:
            raise ValueError(f"a key has the unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def _array(self, name: str) -> list[Any] | None:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind == _ARRAY:
            raise ValueError("an array of arrays")
        if kind != _STRING and kind not in _SCALARS:
            raise ValueError(f"an array has the unknown type {kind}")
        if count <= _KEPT_ARRAY:
            return [self.value(kind) for _ in range(count)]
        self.lengths[name] = count
        if kind == _STRING:
            self._skip_texts(count)
        else:
            self.at = self._within(count * struct.calcsize(_SCALARS[kind]))
        return None

    def _skip_texts(self, count: int) -> None:
        # A vocabulary with its merges is 10^5 strings: this loop is most of what reading a header costs.
        data, unpack, at = self._data, struct.Struct("<Q").unpack_from, self.at
        for _ in range(count):
            at += 8 + unpack(data, at)[0]
        self.at = at
        self._within(0)

    def _within(self, length: int) -> int:
        end = self.at + length
        if end > len(self._data):
            raise struct.error("past the end of the file")
        return end
