"""Pace: how fast one model serves, and so what those who come later are told: when to come back, or not to wait at all."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from slimproc.admission import policy
from slimproc.admission.admitted import Admitted, Asked, next_deadline
from slimproc.admission.rate import SlotTime
from slimproc.errors import Overloaded


class Pace:
    """One model's."""

    def __init__(self) -> None:
        self._slot_time = SlotTime()

    def ended(self, request: Admitted, slots: int) -> None:
        """A request has ended, of a model with so many ``slots``. One with a grammar had its slot for certain only from its
        first text on: others may have had it while the grammar was compiled.
        """
        asked, times = request.request, request.times
        began = times.granted if getattr(asked, "grammar", None) is None else times.first_text
        if began and slots:
            at_once = min(getattr(asked, "sequences", 1), slots)
            self._slot_time.note(at_once * (times.ended - began))

    def retry_after(self, waiting: int, slots: int) -> float:
        """Seconds until those who wait will have been served."""
        mean = self._slot_time.mean
        return policy.retry_after(waiting, slots / mean if mean else 0.0)

    def refusal(self, asked: Asked, waiting: Sequence[Admitted], slots: int) -> Overloaded | None:
        """For whom those who are ``waiting`` already leave no time: it would wait for nothing but its own deadline."""
        now = time.monotonic()
        left = next_deadline(asked, started=False) - now
        if not slots or not 0 < left < math.inf:
            return None
        times_left = [next_deadline(one.request, started=one.started) - now for one in waiting]
        wait = policy.expected_wait(times_left, self._slot_time.median / slots)
        if wait <= left:
            return None
        return Overloaded(
            f"those who wait for {asked.model} already will take about {wait:.1f} s, and this request has {left:.1f} s",
            retry_after=self.retry_after(len(waiting), slots),
        )
