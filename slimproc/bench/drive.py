"""Drive: one server under one plan, closed or open loop, until the plan is done, the server is gone, or somebody stops it."""

from __future__ import annotations

import asyncio
import itertools
import resource
from collections.abc import Coroutine, Iterator
from time import perf_counter
from typing import Final

from slimproc.bench.asks import Asks, arrivals
from slimproc.bench.plan import Plan
from slimproc.bench.pool import ConnectFailed, Pool
from slimproc.bench.sample import Sample, read
from slimproc.bench.target import Target

PATIENCE: Final = 5.0
"""Seconds in which no connection could be made, after which a server counts as gone and the run ends."""
_PAUSE: Final = 0.1
_EARLY: Final = 0.0005
"""Seconds that an arrival may be early: a loop's timers count in milliseconds."""


class Drive:
    """``samples`` grows while ``run`` does; what was measured is there however that ends."""

    def __init__(self, target: Target, plan: Plan, asks: Asks) -> None:
        self.target = target
        self.plan = plan
        self.samples: list[Sample] = []
        self.began = self.ended = 0.0
        self.cpu = 0.0
        """Seconds of CPU that this process took meanwhile."""
        self.gone = ""
        """Why the server counts as gone; empty: it does not."""
        self.stopped = False
        self.running = 0
        """Requests that have begun and not ended."""
        self._asks = asks
        self._pool = Pool(target)
        self._task: asyncio.Task[None] | None = None

    @property
    def wall(self) -> float:
        """Seconds from the first request's intended start until the last answer's end."""
        return (self.ended or perf_counter()) - self.began

    def progress(self) -> tuple[float, float]:
        """How much is done, of how much: requests, or seconds where the plan has only a duration."""
        limit = self.plan.limit
        if limit is not None:
            return len(self.samples), limit
        assert self.plan.duration is not None
        return min(self.wall, self.plan.duration) if self.began else 0.0, self.plan.duration

    async def run(self) -> None:
        """Returns when it is over; ``gone`` and ``stopped`` say how."""
        try:
            if self.plan.warmup:
                await self._until_over(self._streams(iter(range(-self.plan.warmup, 0))))
                if self.gone:
                    return
                self.samples.clear()
            used = _cpu()
            if not self.stopped:
                await self._until_over(self._open() if self.plan.rate else self._closed())
            self.ended = perf_counter()
            self.cpu = _cpu() - used
        finally:
            self._pool.close()

    def stop(self) -> None:
        """Begin nothing more, and let go of what runs."""
        self.stopped = True
        if self._task is not None:
            self._task.cancel()

    # --- who begins requests when -----------------------------------------------------------------------------------------

    async def _until_over(self, work: Coroutine[None, None, None]) -> None:
        self.began = self._pool.contact = perf_counter()
        self._task = asyncio.ensure_future(work)
        try:
            await self._task
        except asyncio.CancelledError:
            if not self.stopped:  # it is we who are to end
                raise

    async def _closed(self) -> None:
        limit = self.plan.limit
        await self._streams(iter(range(limit)) if limit is not None else itertools.count())

    async def _streams(self, numbers: Iterator[int]) -> None:
        """As many as the plan has, each with one request at a time."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self.plan.streams):
                group.create_task(self._stream(numbers))

    async def _stream(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            now = perf_counter()
            if self.stopped or (self.plan.duration is not None and now - self.began >= self.plan.duration):
                return
            if not await self._one(number, now):
                await asyncio.sleep(_PAUSE)  # nobody is there: do not ask a hundred thousand times a second

    async def _open(self) -> None:
        """A request begins when it is due, whatever became of those before it, and is timed from then: a server that
        stands still cannot keep the requests away that would have had to wait for it.
        """
        assert self.plan.rate is not None
        numbers = itertools.count() if self.plan.limit is None else iter(range(self.plan.limit))
        async with asyncio.TaskGroup() as group:
            for number, at in zip(numbers, arrivals(self.plan.rate, self.plan.seed), strict=False):
                if self.stopped or (self.plan.duration is not None and at >= self.plan.duration):
                    break
                due = self.began + at
                await _sleep_until(due)
                group.create_task(self._one(number, min(due, perf_counter())))

    # --- one request --------------------------------------------------------------------------------------------------------

    async def _one(self, number: int, intended: float) -> bool:
        """False: no connection could be made."""
        ask = self._asks.ask(number)
        self.running += 1
        try:
            async with asyncio.timeout(self.plan.timeout - (perf_counter() - intended)):
                answer = await self._pool.ask(self.target.post(self.plan.route, ask.body), ask.leave_after)
        except TimeoutError:
            self._fault(number, intended, "timeout", f"no whole answer within {self.plan.timeout:g} seconds")
            return True
        except ConnectFailed as error:
            self._fault(number, intended, "connect", str(error))
            if perf_counter() - self._pool.contact > PATIENCE:
                self._give_up(str(error))
            return False
        finally:
            self.running -= 1
        self.samples.append(read(answer, number=number, intended=intended, began=self.began, stream=self.plan.stream))
        return True

    def _fault(self, number: int, intended: float, kind: str, detail: str) -> None:
        start, latency = intended - self.began, perf_counter() - intended
        self.samples.append(Sample(number=number, start=start, latency=latency, kind=kind, detail=detail))

    def _give_up(self, why: str) -> None:
        self.gone = why
        self.stop()


async def _sleep_until(due: float) -> None:
    """At least one turn of the loop: who is late lets the requests run that have begun."""
    await asyncio.sleep(max(0.0, due - perf_counter() - _EARLY))
    while (ahead := due - perf_counter()) > _EARLY:  # noqa: ASYNC110 - a timer may ring too early
        await asyncio.sleep(ahead)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
