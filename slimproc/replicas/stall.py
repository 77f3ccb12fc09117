"""StallWatch: alive means steps done. Neither a process that exists nor one that answers is alive: one that steps is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class StallWatch:
    """Looks at one engine's count of steps while sequences are in it, and costs nothing while there are none.

    ``on_stall`` is called once, with the reason; then the watch is over.
    """

    def __init__(
        self, steps: Callable[[], int], on_stall: Callable[[str], None], *, stall_timeout: float, cancel_grace: float
    ) -> None:
        """``steps`` reads the engine's own count. Times in seconds."""
        self._loop = asyncio.get_running_loop()
        self._steps = steps
        self._on_stall = on_stall
        self._stall_timeout = stall_timeout
        self._cancel_grace = cancel_grace
        self._interval = min(1.0, stall_timeout / 4, cancel_grace / 4)
        self._timer: asyncio.TimerHandle | None = None
        self._running: set[int] = set()
        self._cancelled: dict[int, float] = {}
        """When a sequence that is still in the engine was asked to stop."""
        self._seen = (0, 0.0)
        self._looks_at = 0.0
        self.overdue = False
        """A sequence has not stopped when it was asked to: the engine is to get no other, until it does or is killed."""

    def reload_takes(self, seconds: float) -> None:
        """To wait is cheaper than to kill and load again, for as long as that takes."""
        self._cancel_grace = max(self._cancel_grace, seconds)

    @property
    def watching(self) -> bool:
        return self._timer is not None

    def started(self, rid: int) -> None:
        self._running.add(rid)
        if self._timer is None:
            self._seen = (self._steps(), self._loop.time())
            self._arm()

    def asked_to_stop(self, rid: int) -> None:
        self._cancelled.setdefault(rid, self._loop.time())

    def ended(self, rid: int) -> None:
        self._running.discard(rid)
        if self._cancelled.pop(rid, None) is not None:
            self.overdue = False
        if not self._running:
            self.close()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._looks_at = self._loop.time() + self._interval
        self._timer = self._loop.call_later(self._interval, self._look)

    def _look(self) -> None:
        late = self._loop.time() - self._looks_at
        if late > self._interval:
            self._forgive(late)
        reason = self._stalled()
        if reason:
            self._timer = None
            self._on_stall(reason)
        else:
            self._arm()

    def _forgive(self, seconds: float) -> None:
        """We did not run ourselves: a machine that slept or a frozen container has stopped the engine, too."""
        steps, since = self._seen
        self._seen = (steps, since + seconds)
        self._cancelled = {rid: at + seconds for rid, at in self._cancelled.items()}

    def _stalled(self) -> str:
        steps, since = self._seen
        now_steps, now = self._steps(), self._loop.time()
        if now_steps != steps:
            self._seen = (now_steps, now)
        elif now - since >= self._stall_timeout:
            return f"the engine made no step in {self._stall_timeout:g} s with {len(self._running)} sequences in it"
        # Where all that it works for has been cancelled, loading it again takes less than waiting. The living requests
        # in it go on: their steps, or the absence of them, decide. But no others come in, so that this ends.
        self.overdue = bool(self._cancelled) and now - min(self._cancelled.values()) > self._cancel_grace
        if self.overdue and len(self._cancelled) == len(self._running):
            return f"the engine did not stop a cancelled sequence in {self._cancel_grace:g} s"
        return ""
