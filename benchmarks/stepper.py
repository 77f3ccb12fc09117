"""Stepper: a token source inside a server's own loop: one step a turn of the loop, for all streams at once.

Both sides of a comparison are driven by it, so that the way tokens arrive costs both the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PAUSE = 0.001
"""Seconds to let a client catch up; uvloop's timers count in milliseconds."""


class Stepper:
    """Waits for ``streams`` streams, then makes steps until each has its tokens; then for the next round of them."""

    def __init__(
        self,
        streams: int,
        *,
        step: Callable[[int], None],
        unread: Callable[[], int],
        max_unread: int = 0,
        check_every: int = 4,
        every: float = 0.0,
    ) -> None:
        """``step(i)`` makes the round's i-th step, from 0; ``unread`` is the largest number of bytes that wait in one of
        the server's own buffers, because the kernel's are full. Over ``max_unread``, looked at every ``check_every``
        steps, the source waits: what waits there is written together, and is no write of its own any more. ``every``:
        seconds between two steps (uvloop counts whole milliseconds); 0: the next turn of the loop.
        """
        self._loop = asyncio.get_running_loop()
        self._streams = streams
        self._step = step
        self._unread = unread
        self._max_unread = max_unread
        self._check_every = check_every
        self._every = every
        self._present = self._steps = self._done = 0

    def join(self, steps: int) -> None:
        """One more stream is there, which wants ``steps`` steps; all of a round want the same."""
        self._steps = steps
        self._present += 1
        if self._present == self._streams:
            self._present = self._done = 0
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if self._done % self._check_every == 0 and self._unread() > self._max_unread:
            self._loop.call_later(PAUSE, self._turn)
            return
        self._step(self._done)
        self._done += 1
        if self._done == self._steps:
            return
        if self._every:
            self._loop.call_later(self._every, self._turn)
        else:
            self._loop.call_soon(self._turn)
