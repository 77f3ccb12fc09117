"""DrainRate: how fast a model's queue empties, for whoever is told when to come back."""

from __future__ import annotations

import math

_MEMORY = 30.0
"""Seconds over which the rate is averaged."""


class DrainRate:
    """How many requests end per second: each counts, and is forgotten exponentially. Instants are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._began = self._last = now
        self._count = 0.0

    def note(self, now: float) -> None:
        """A request has ended."""
        self._count = self._remembered(now) + 1.0
        self._last = now

    def per_second(self, now: float) -> float:
        remembered_seconds = _MEMORY * (1.0 - math.exp(-(now - self._began) / _MEMORY))
        return self._remembered(now) / max(1.0, remembered_seconds)

    def _remembered(self, now: float) -> float:
        return self._count * math.exp(-(now - self._last) / _MEMORY)
