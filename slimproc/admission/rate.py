"""SlotTime: how long one request of a model keeps a slot, and so how fast its queue drains."""

from __future__ import annotations

import statistics
from collections import deque

_LATEST = 32
_FEWEST = 3


class SlotTime:
    """Of the latest requests that had a slot, however they ended. Seconds; of several slots, together.

    Unlike a count of ends a second it says what is possible and not what was asked for: after a quiet hour it holds.
    """

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_LATEST)

    def note(self, seconds: float) -> None:
        self._latest.append(seconds)

    @property
    def mean(self) -> float:
        """For what many take together. 0 while too few are known."""
        return statistics.fmean(self._latest) if len(self._latest) >= _FEWEST else 0.0

    @property
    def median(self) -> float:
        """For a verdict on one request, which a single long answer must not tip. 0 while too few are known."""
        return statistics.median(self._latest) if len(self._latest) >= _FEWEST else 0.0
