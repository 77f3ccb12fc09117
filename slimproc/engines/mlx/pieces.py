"""The exact bytes that each token adds to a text, from the decoder that tokenizer.json describes.

Decoding token by token would lose them: half a character comes out as U+FFFD, and the first space is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnknownDecoderError(ValueError):
    """tokenizer.json describes a way to turn tokens into text that is not known here."""


def spelled_bytes() -> dict[str, int]:
    """The visible characters by which byte-level vocabularies write bytes: printable ones as themselves, the others
    from U+0100 on (GPT-2's table).
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


class PieceDecoder:
    """From a token as the vocabulary writes it to bytes. ``strips``: a whole text's first space is not its own."""

    def __init__(self, description: dict[str, Any] | None) -> None:
        """``description``: the decoder in tokenizer.json. Raises UnknownDecoderError."""
        self.strips = False
        self._steps: list[Callable[[str], str]] = []
        self._byte_level = False
        self._byte_tokens = False
        self._table = spelled_bytes()
        for part in _parts(description):
            self._add(part)

    def piece(self, token: str) -> bytes:
        """The bytes of an ordinary token."""
        if self._byte_tokens and (match := _BYTE.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for step in self._steps:
            token = step(token)
        if self._byte_level:
            # What was added to a vocabulary by hand is not always spelled in bytes.
            known = [self._table.get(character) for character in token]
            if None not in known:
                return bytes(byte for byte in known if byte is not None)
        return token.encode("utf-8", "replace")

    def _add(self, part: dict[str, Any]) -> None:
        match part.get("type"):
            case "ByteLevel":
                self._byte_level = True
            case "ByteFallback":
                self._byte_tokens = True
            case "Replace":
                pattern, content = _text_pattern(part), str(part.get("content", ""))
                self._steps.append(lambda token: token.replace(pattern, content))
            case "Metaspace":
                mark = str(part.get("replacement", "▁"))
                self._steps.append(lambda token: token.replace(mark, " "))
                scheme = part.get("prepend_scheme", "always" if part.get("add_prefix_space", True) else "never")
                self.strips |= scheme != "never"
            case "Strip":
                self.strips |= part.get("content") == " " and part.get("start", 0) > 0
            case "Fuse":
                pass
            case kind:
                raise UnknownDecoderError(f"its decoder {kind!r} is not known here")


def _parts(description: dict[str, Any] | None) -> list[dict[str, Any]]:
    if description is None:
        return []
    if description.get("type") == "Sequence":
        return [inner for part in description.get("decoders", []) for inner in _parts(part)]
    return [description]


def _text_pattern(part: dict[str, Any]) -> str:
    pattern = part.get("pattern")
    text = pattern.get("String") if isinstance(pattern, dict) else None
    if not isinstance(text, str):
        raise UnknownDecoderError("its decoder replaces a regular expression, which is not known here")
    return text
