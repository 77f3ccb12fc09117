"""LagMeter: how late the event loop wakes from a timer, which is how long any request may wait for the front itself."""

from __future__ import annotations

import asyncio
import time

from slimproc.metrics import Histogram

INTERVAL = 1.0


class LagMeter:
    """Observes into ``histogram`` (seconds) once every ``INTERVAL``."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram

    async def run(self) -> None:
        while True:
            due = time.monotonic() + INTERVAL
            await asyncio.sleep(INTERVAL)
            self._histogram.observe(max(0.0, time.monotonic() - due))
