"""GrammarMatcher: where one sequence stands in its grammar, and which tokens may come next."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher

_CREDIT, _CREDIT_PER_TOKEN = 1.0, 0.01
"""Seconds of computing that an answer's masks may take: neighbours wait for them. A usual one takes 0.0001."""


_LONGEST_REASON = 300


class GrammarError(Exception):
    """The matcher cannot go on, or takes too long: this sequence fails, and no other."""


class GrammarMatcher:
    """One sequence's own; neither ``mask`` nor ``accept`` may be called after GrammarError.

    Once a step: ``mask``, choose among what it allows, ``accept`` unless the choice was one of the model's ends.
    """

    __slots__ = ("_buffer", "_credit", "_matcher", "_width")

    def __init__(self, matcher: LLMatcher, width: int) -> None:
        """``width``: of the model's rows of logits."""
        self._matcher = matcher
        self._width = width
        self._buffer = np.zeros(-(-width // 32), np.int32)
        self._credit = _CREDIT

    def mask(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next, bool of shape (width,); at least one, and the ends only where the grammar is
        complete. Raises GrammarError.
        """
        began = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(self._buffer.ctypes.data, self._buffer.nbytes)
        self._credit += _CREDIT_PER_TOKEN - (time.thread_time() - began)
        if self._matcher.is_error():
            raise GrammarError(reason(self._matcher.get_error()))
        if self._credit < 0:
            raise GrammarError("following it takes too much time")
        return np.unpackbits(self._buffer.view(np.uint8), count=self._width, bitorder="little").view(np.bool_)

    def accept(self, token: int) -> None:
        """Go on by a token that ``mask`` allowed. Raises GrammarError."""
        if not self._matcher.consume_token(token):
            raise GrammarError(reason(self._matcher.get_error()))

    @property
    def stopped(self) -> bool:
        """The grammar is complete and nothing may follow: the answer ends with the token that was accepted last."""
        return self._matcher.is_stopped() and not self._matcher.is_error()


def reason(message: str) -> str:
    """An error of the library in one line of bounded length, without its internal state."""
    line = " ".join(message.partition("<non-verbose/>")[0].split())
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 1] + "…"
