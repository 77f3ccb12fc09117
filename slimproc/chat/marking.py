"""Marking: a caller's characters that could make a control token carry a mark through the template and are found after it.

Pure. A mark swaps one character for one that nobody wrote (its *twin*), so lengths, slices, ``trim`` and ``in`` behave.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Final

from slimproc.chat.token_set import TokenSet, fold

_TWINS: Final = (range(0xF0000, 0x110000), range(0x40000, 0xE0000))
"""Where twins are taken from: private use first, then planes that Unicode has given to nobody. None has case or width."""

_USED = re.compile("[\U00040000-\U0010ffff]")

_SCHEMA_KEYS: Final = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "id", "type", "function", "arguments", "text", "refusal"}
)
_SCHEMA_VALUES: Final = {
    "role": frozenset({"system", "developer", "user", "assistant", "tool", "function"}),
    "type": frozenset({"function", "text"}),
}
"""Words of the API, not the caller's: templates compare them and write control tokens with them (``<|user|>``)."""


class TooManyTwins(ValueError):
    """The messages use every character that could have been a mark."""


class Marker:
    """What is to be marked for one template: its model's control tokens, and what the template itself writes."""

    def __init__(self, control_tokens: Iterable[str], template: str = "", *written: str) -> None:
        """``written``: other texts that the template may put out (BOS, EOS)."""
        self.tokens = TokenSet(control_tokens)
        self.fills_gaps = self.tokens.has_gap(template)
        self.used = frozenset(chain.from_iterable(map(_USED.findall, (*self.tokens.texts, template, *written))))

    def mark(self, messages: list[dict[str, Any]]) -> Marked:
        """The messages, marked. Raises TooManyTwins, and RecursionError when they nest too deeply."""
        return Marked(self, messages)

    def positions(self, text: str) -> list[int]:
        """Which characters of a caller's string to mark; none in nearly every string.

        A control token's text in the output that holds a character of this string begins in it (its first character
        is marked), or begins before it and ends in it (the string's first character is marked), or goes on beyond
        both its ends (the same, where the template has such a gap). As templates trim, each end is looked at with and
        without its whitespace.
        """
        folded = fold(text)
        found = set(self.tokens.starts(folded))
        first, last = len(text) - len(folded.lstrip()), len(folded.rstrip())
        for end in {last, len(text)}:
            offset = max(0, end - self.tokens.longest)
            found.update(offset + at for at in self.tokens.open_starts(folded[offset:end]))
        for start in {0, first}:
            if self.tokens.is_open_end(folded[start : start + self.tokens.longest]):
                found.add(start)
        if self.fills_gaps and self.tokens.is_piece(folded.strip() or folded):
            found.add(first if first < len(text) else 0)
        return sorted(found)


class Marked:
    """One request's messages with marks in them, and how to take the marks out of what was made from them."""

    def __init__(self, marker: Marker, messages: list[dict[str, Any]]) -> None:
        self._marker = marker
        self._original = messages
        self._twins: dict[str, str] = {}
        self._unused: Iterator[str] | None = None
        self.messages: list[dict[str, Any]] = [self._value(message) for message in messages]

    def restore(self, text: str) -> str:
        """``text`` without marks."""
        for char, twin in self._twins.items():
            text = text.replace(twin, char)
        return text

    def literals(self, rendered: str, restored: str) -> list[tuple[int, int]]:
        """Spans of ``restored``, sorted, disjoint and not touching, that hold control tokens' texts and caller's words.

        What the template alone wrote is never in a span: where a caller's text continues it into another token's
        text, the span is the rest.
        """
        if rendered == restored:
            return []
        touched: list[tuple[int, int]] = []
        untouched: list[tuple[int, int]] = []
        for start, end in self._marker.tokens.occurrences(restored):
            spans = untouched if rendered.startswith(restored[start:end], start) else touched
            if spans and start <= spans[-1][1]:
                spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
            else:
                spans.append((start, end))
        return _without(touched, untouched)

    def _value(self, value: Any, key: str | None = None) -> Any:
        if isinstance(value, str):
            return value if value in _SCHEMA_VALUES.get(key or "", ()) else self._text(value)
        if isinstance(value, dict):
            return {self._key(key): self._value(item, key) for key, item in value.items()}
        if isinstance(value, list):
            return [self._value(item) for item in value]
        return value

    def _key(self, key: Any) -> Any:
        return key if key in _SCHEMA_KEYS or not isinstance(key, str) else self._text(key)

    def _text(self, text: str) -> str:
        positions = self._marker.positions(text)
        if not positions:
            return text
        pieces: list[str] = []
        done = 0
        for at in positions:
            pieces += (text[done:at], self._twin(text[at]))
            done = at + 1
        pieces.append(text[done:])
        return "".join(pieces)

    def _twin(self, char: str) -> str:
        if char in self._twins:
            return self._twins[char]
        if self._unused is None:
            used = self._marker.used.union(*(_USED.findall(text) for text in _strings(self._original)))
            self._unused = (twin for twin in map(chr, chain(*_TWINS)) if twin not in used)
        try:
            twin = self._twins[char] = next(self._unused)
        except StopIteration:
            raise TooManyTwins from None
        return twin


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if not value.isascii():
            yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _without(spans: list[tuple[int, int]], holes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """What of ``spans`` is in none of ``holes``. Both are sorted and disjoint, and so is the result."""
    left: list[tuple[int, int]] = []
    at = 0
    for start, end in spans:
        while at < len(holes) and holes[at][1] <= start:
            at += 1
        reach, hole = start, at
        while hole < len(holes) and holes[hole][0] < end:
            if reach < holes[hole][0]:
                left.append((reach, holes[hole][0]))
            reach = max(reach, holes[hole][1])
            hole += 1
        if reach < end:
            left.append((reach, end))
    return left
