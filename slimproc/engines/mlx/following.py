"""What watches a sequence's logits go by: the recorder of log probabilities, and the follower of a grammar.

Both stand among a sequence's processors, which BatchGenerator calls one step before it gives the token out.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from slimproc.engines.grammar.matcher import GrammarError, GrammarMatcher
from slimproc.engines.mlx.library import mx


class Recorder:
    """Keeps the logits as the model gave them until their token comes out. The first of a sequence's processors."""

    def __init__(self) -> None:
        self._rows: deque[Any] = deque()

    def __call__(self, _tokens: Any, logits: Any) -> Any:
        row = logits[0]
        mx.async_eval(row)  # now, or reading it later would wait for the next step
        self._rows.append(row)
        return logits

    def take(self) -> npt.NDArray[np.float32]:
        """The row from which the token was chosen that comes out now."""
        return np.asarray(self._rows.popleft())


class Follower:
    """Rules out what a grammar does not allow. The last of a sequence's processors.

    It reads each token as soon as it is computed, for the next mask depends on it; other sequences' need not be read.
    """

    def __init__(self, grammar: GrammarMatcher, ends: frozenset[int], *, ignore_ends: bool) -> None:
        self._grammar = grammar
        self._ends = ends
        self._ignored = sorted(ends) if ignore_ends else []
        self._answering = False
        self.complete = False
        """The token that comes out now is the last one that the grammar allows."""
        self.failure: str | None = None
        """Why the sequence cannot go on: an exception here would cost its neighbours."""

    def __call__(self, tokens: Any, logits: Any) -> Any:
        if self.complete or self.failure is not None:
            return logits  # nobody will hear of it
        try:
            if self._answering and not self._accept(int(tokens[-1].item())):
                return logits
            self._answering = True
            allowed = mx.array(self._allowed())
        except GrammarError as error:
            self.failure = f"the grammar cannot be followed any further: {error}"
            return logits
        return mx.where(allowed, logits, -mx.inf)

    def _accept(self, token: int) -> bool:
        """Whether another token may follow."""
        if token in self._ends:
            return False
        self._grammar.accept(token)
        self.complete = self._grammar.stopped
        return not self.complete

    def _allowed(self) -> npt.NDArray[np.bool_]:
        allowed = self._grammar.mask()
        if self._ignored:
            others = allowed.copy()
            others[self._ignored] = False
            if others.any():  # else only an end is left, and to ignore it would leave nothing
                return others
        return allowed
