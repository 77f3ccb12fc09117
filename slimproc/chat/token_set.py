"""TokenSet: where a text holds a control token's text, and where it could begin, end or fill one.

Pure. Built once per template; every question is answered in time linear in the text, whatever the number of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

_SEPARATOR: Final = "\ud800"
"""Half a surrogate pair: it cannot arrive over the wire, so it is in no token and in no caller's text."""

_BOUNDARY = re.compile(r"['\"]|\{\{|\}\}|\{%|%\}|\{#|#\}")
"""Where a template's own text may stop and an expression begin, or the other way round."""


def fold(text: str) -> str:
    """``text`` without its case, as long as before, so that a position means the same in both.

    Whatever ``lower`` and ``upper`` can turn into the same ASCII letter is the same afterwards: dotted and dotless i and
    the long s are the letters that ``str.lower`` would leave apart (and the only one that it would lengthen); the
    final sigma depends on its neighbours. Characters that ``upper`` turns into several are left as they are.
    """
    if text.isascii():
        return text.lower()
    text = text.replace("\u0130", "i").lower()
    return text.replace("\u0131", "i").replace("\u017f", "s").replace("\u03c2", "\u03c3")


class TokenSet:
    """The control tokens of one model. Positions and lengths are in characters.

    Texts of one character and texts of whitespace alone are left out: a line feed or "a" is ordinary writing, whatever a
    model file calls it, and to treat each as an injection would cut every harmless text at every line.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(text for text in texts if len(text) >= 2 and not text.isspace())
        folded = {fold(text) for text in self.texts}
        self.longest = max(map(len, folded), default=0)
        self._firsts = frozenset(text[0] for text in folded)
        self._lasts = frozenset(text[-1] for text in folded)
        self._forwards = _joined(folded)
        self._backwards = _joined(text[::-1] for text in folded)
        self._starts = re.compile(_lookahead_pattern(folded)) if folded else None
        lengths: dict[str, set[int]] = {}
        for text in self.texts:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {key: sorted(values) for key, values in lengths.items()}

    def starts(self, folded: str) -> Iterator[int]:
        """Every position of the folded text where some token begins, also inside another one; ascending."""
        return (match.start() for match in self._starts.finditer(folded)) if self._starts else iter(())

    def occurrences(self, text: str) -> Iterator[tuple[int, int]]:
        """Every (start, end) in ``text`` that spells a token exactly, overlapping ones too; ascending starts."""
        for start in self.starts(fold(text)):
            for length in self._lengths.get(text[start : start + 2], ()):
                end = start + length
                if end <= len(text) and text[start:end] in self.texts:
                    yield start, end

    def open_starts(self, folded: str) -> Iterator[int]:
        """Every position from which the folded text, to its end, is the beginning of a token and not the whole."""
        for at in range(max(0, len(folded) - self.longest + 1), len(folded)):
            if folded[at] in self._firsts and _is_proper_prefix(folded[at:], self._forwards):
                yield at

    def is_open_end(self, folded: str) -> bool:
        """Does the folded text begin with the end of a token that begins before it?"""
        return any(
            folded[at] in self._lasts and _is_proper_prefix(folded[at::-1], self._backwards)
            for at in range(min(len(folded), self.longest - 1))
        )

    def is_piece(self, folded: str) -> bool:
        """Is the whole folded text a piece of some token?"""
        return 0 < len(folded) <= self.longest and folded in self._forwards

    def has_gap(self, template: str) -> bool:
        """Does the template's own text leave a token open before an expression, and close one after an expression?

        Only such a template (``'<|' + name + '|>'``) makes a control token around a caller's whole string.
        """
        folded, opened, closed = fold(template), False, False
        for match in _BOUNDARY.finditer(folded):
            before = folded[max(0, match.start() - self.longest) : match.start()]
            after = folded[match.end() : match.end() + self.longest]
            # Whitespace control may strip either side, so each is looked at with and without its whitespace.
            opened = opened or any(True for text in (before, before.rstrip()) for _ in self.open_starts(text))
            closed = closed or self.is_open_end(after) or self.is_open_end(after.lstrip())
            if opened and closed:
                return True
        return False


def _joined(texts: Iterable[str]) -> str:
    # Descending, so that of all texts that begin with some prefix the prefix itself, if it is one of them, is last.
    return _SEPARATOR + "".join(text + _SEPARATOR for text in sorted(texts, reverse=True))


def _is_proper_prefix(piece: str, joined: str) -> bool:
    at = joined.find(_SEPARATOR + piece)
    return at >= 0 and joined[at + 1 + len(piece)] != _SEPARATOR


def _lookahead_pattern(words: Iterable[str]) -> str:
    # The first character is outside the lookahead so that the scan can skip to it; only one character is consumed, so
    # that overlapping tokens are all found.
    by_first: dict[str, list[str]] = {}
    for word in words:
        by_first.setdefault(word[0], []).append(word[1:])
    return "|".join(f"{re.escape(first)}(?={_pattern(rests)})" for first, rests in by_first.items())


def _pattern(words: list[str]) -> str:
    """A regular expression for any of ``words``, shaped as their prefix tree: thousands of words cost no more than one."""
    if "" in words:
        return ""
    by_first: dict[str, list[str]] = {}
    for word in words:
        by_first.setdefault(word[0], []).append(word)
    branches = []
    for group in by_first.values():
        lowest, highest = min(group), max(group)
        shared = next((at for at, char in enumerate(lowest) if char != highest[at]), len(lowest))
        branches.append(re.escape(lowest[:shared]) + _pattern([word[shared:] for word in group]))
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
