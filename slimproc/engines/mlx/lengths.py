"""LeastTokens: how few tokens a text can have, from what tokenizer.json says; without tokenizing it, which takes long.

Known only of kinds that lose nothing of a text on the way to its tokens: many drop blanks, or make one token of whatever
they do not know.
"""

from __future__ import annotations

from typing import Any

from slimproc.engines.mlx.pieces import spelled_bytes

_NFC = 4
"""How many bytes at most become one by NFC: U+1FBE U+0308 U+0301, which are 7, become the 2 of U+0390."""
_KEEP = frozenset({"Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"})
"""Ways to cut at a pattern that leave it in the text."""


class LeastTokens:
    """Of one tokenizer."""

    def __init__(self, description: dict[str, Any]) -> None:
        """``description``: tokenizer.json, of which a tokenizer could be made."""
        model, added = description["model"], description.get("added_tokens") or []
        self._swallows = any(token.get("lstrip") or token.get("rstrip") for token in added)
        """Some tokens take the blanks beside them along."""
        shrinks = _shrinks(description.get("normalizer"))
        kinds = _cutting(description.get("pre_tokenizer"))
        self._longest: int | None = None
        """Bytes of a text that one token stands for at most. None: nothing is known."""
        if shrinks is not None and kinds is not None and _spells_all(model, byte_level="ByteLevel" in kinds):
            pieces = map(len, model["vocab"]) if "ByteLevel" in kinds else map(_size, model["vocab"])
            whole = (_size(token.get("content", "")) for token in added)
            self._longest = shrinks * max(1, *pieces, *whole)

    def of(self, text: str) -> int:
        """No fewer tokens does ``text`` have; 0 where nothing is known."""
        if self._longest is None:
            return 0
        return -(-_size("".join(text.split()) if self._swallows else text) // self._longest)


def _size(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def _spells_all(model: dict[str, Any], *, byte_level: bool) -> bool:
    """Whether the vocabulary has a token for every byte, so that there is no text that it does not know."""
    if model.get("type") != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    if byte_level:
        return spelled_bytes().keys() <= set(model["vocab"])
    byte_tokens = {f"<0x{byte:02X}>" for byte in range(256)}
    return bool(model.get("byte_fallback")) and byte_tokens <= set(model["vocab"])


def _shrinks(part: dict[str, Any] | None) -> int | None:
    """How many bytes a normalizer makes one of, at most. None: that is not known."""
    if part is None:
        return 1
    match part.get("type"):
        case "Sequence":
            shrinks = 1
            for inner in part["normalizers"]:
                found = _shrinks(inner)
                if found is None:
                    return None
                shrinks *= found
            return shrinks
        case "Prepend":
            return 1
        case "NFC":
            return _NFC
        case "Replace":
            pattern = part["pattern"].get("String")
            return 1 if pattern and _size(part.get("content", "")) >= _size(pattern) else None
    return None


def _cutting(part: dict[str, Any] | None) -> set[str] | None:
    """The kinds of steps that cut a text into words. None: one may drop some of it."""
    if part is None:
        return set()
    kind = part.get("type")
    match kind:
        case "Sequence":
            found = [_cutting(inner) for inner in part["pretokenizers"]]
            known = [kinds for kinds in found if kinds is not None]
            return set().union(*known) if len(known) == len(found) else None
        case "ByteLevel" | "Digits" | "Metaspace":
            return {kind}
        case "Split" | "Punctuation":
            return {kind} if part.get("behavior") in _KEEP else None
    return None
