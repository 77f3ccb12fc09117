"""PromptLookup: an answer's next tokens, guessed from what followed the same few tokens before (prompt lookup decoding).

After github.com/apoorvumang/prompt-lookup-decoding: no second model, only the text so far. Right for answers that copy.
"""

from __future__ import annotations

from collections.abc import Sequence

GRAM = 3
"""Tokens that must be the same. Fewer are the same by chance more often, and each wrong guess costs its share of a step."""
_FIRST = 2
"""Tokens of the first guess. Each that comes wholly true doubles the next."""
_LONGEST_PAUSE = 64
"""Tokens for which a sequence is left alone, at most, that no guess came true for."""


class PromptLookup:
    """One sequence's guesses. It must be asked with a list of tokens that only ever grows."""

    __slots__ = ("_after", "_indexed", "_pause", "_resume", "_size")

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        """Where the token stands that came after so many tokens the last time."""
        self._indexed = GRAM
        self._size = _FIRST
        self._pause = 1
        self._resume = 0

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most ``most`` tokens that may come after ``tokens``; none where nothing is known, or guesses were wrong."""
        if len(tokens) < self._resume:
            return []
        after = self._after
        for at in range(self._indexed, len(tokens)):
            after[tuple(tokens[at - GRAM : at])] = at
        self._indexed = max(self._indexed, len(tokens))
        begin = after.get(tuple(tokens[-GRAM:]))
        if begin is None:
            return []
        # What is repeated may be shorter than the guess: then it goes round.
        period = len(tokens) - begin
        return [tokens[begin + place % period] for place in range(min(most, self._size))]

    def judge(self, right: int, guessed: int, length: int) -> None:
        """``right`` of ``guessed`` tokens came true, and the text has ``length`` tokens now."""
        if right == guessed:
            self._size = max(self._size, 2 * guessed)
        elif right:
            self._size = max(right, _FIRST)
        else:
            self._size = _FIRST
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._resume = length + self._pause
            return
        self._pause = 1
