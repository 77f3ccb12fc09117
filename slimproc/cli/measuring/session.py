"""Session: rounds of load, requests and unload of one model, with the meter running."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final, Protocol

import msgspec

from slimproc.cli.measuring.asked import Asked
from slimproc.cli.measuring.contexts import FullContexts
from slimproc.cli.measuring.failures import BadAsk
from slimproc.cli.measuring.meter import Meter
from slimproc.cli.measuring.place import Place
from slimproc.cli.measuring.posts import Posts
from slimproc.cli.measuring.profile import Measured, Round, hardware_name, profile
from slimproc.cli.measuring.showing import Progress
from slimproc.cli.measuring.subject import Subject
from slimproc.config import Config, ModelConfig
from slimproc.replicas.environment import engine_environment
from slimproc.residency.sampler import Sampler
from slimproc.residency.views import HOST, Claim, Sample

_STEADY_BEFORE: Final = 0.5
_STEADY_AFTER: Final = 2.0
"""Seconds without a change after which a device has settled, before a load and after an unload: a driver may give memory
back late.
"""
_SETTLE_LIMIT: Final = 15.0
_TICK: Final = 0.25
"""Seconds between two looks at the peak of requests, for people."""


class Work(Protocol):
    """The requests of one turn."""

    concurrency: int

    async def run(self, turn: int) -> None: ...
    async def close(self) -> None: ...


class Session:
    """One a command. ``run`` may be cancelled at any time; what it has started has ended when it returns."""

    def __init__(
        self, config: Config, model: ModelConfig, asked: Asked, environ: Mapping[str, str], progress: Progress
    ) -> None:
        """In the loop. Raises BadAsk."""
        if model.upstream is not None and asked.concurrency is not None:
            model = msgspec.structs.replace(model, concurrency=asked.concurrency)
        self._asked = asked
        self._progress = progress
        self._subject = Subject(config, model, environ)
        self._place = Place(config, self._subject, environ)
        self._news = asyncio.Event()
        self._meter: Meter | None = None
        self._sampler = Sampler(self._on_sample, environ=engine_environment(environ, "probe"))
        self._ours = model.upstream is None or model.command is not None
        self._work = self._make_work(model, asked)

    def _make_work(self, model: ModelConfig, asked: Asked) -> Work:
        if model.upstream is not None:
            return Posts(self._subject, asked)
        if asked.body is not None:
            raise BadAsk("--body is for servers that are no engines of ours: a local model gets full contexts")
        return FullContexts(self._subject, asked.concurrency)

    @property
    def small(self) -> bool:
        """The requests' body was one of ours."""
        return isinstance(self._work, Posts) and self._work.small

    def _on_sample(self, sample: Sample) -> None:
        self._news.set()
        if self._meter is not None:
            self._meter.on_sample(sample)

    def kill(self) -> None:
        self._subject.kill()

    # --- the whole ----------------------------------------------------------------------------------------------------

    async def run(self) -> Measured:
        """Raises CannotMeasure or ConfigError, in a group."""
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._sampler.run(), name="sampler"),
                    tasks.create_task(self._subject.keep(), name="replica"),
                ]
                try:
                    measured = await self._measure(tasks, running)
                finally:
                    await self._subject.close()
                    for task in running:
                        task.cancel()
        finally:
            await self._work.close()
            await self._subject.release()
        self._keep(measured)
        return measured

    async def _measure(self, tasks: asyncio.TaskGroup, running: list[asyncio.Task[None]]) -> Measured:
        device, seen = await self._place.find(self._sampler, self._news)
        claim = self._place.mapped_file(device)
        meter = self._meter = Meter(device, counts_mapped=claim.file is None, tell=self._sampler.watch)
        running.append(tasks.create_task(meter.run(), name="meter"))
        await self._begin_unloaded(device)
        rounds = []
        for number in range(1, self._asked.rounds + 1):
            rounds.append(await self._round(number, device, meter))
            self._progress.show(rounds[-1])
        hardware = hardware_name(device, seen.name)
        return Measured(rounds, device, hardware, self._work.concurrency, claim.file, claim.file_bytes)

    def _keep(self, measured: Measured) -> None:
        memory = profile(measured, self._asked)
        self._place.keep(Claim(memory.load_peak, memory.inference_peak, source="measured"))

    async def _begin_unloaded(self, device: str) -> None:
        """A server that has its model in memory already gives it up first: there is no state without it to compare with."""
        state = await self._subject.seen(self._subject.model.load_timeout)
        if state in ("ready", "loading", "unloading"):
            self._progress.say(f"{self._subject.model.name}: its server is {state}; it is unloaded first")
            await self._subject.load(device, lambda: None)
            await self._subject.unload(lambda: None)

    # --- a round ------------------------------------------------------------------------------------------------------

    async def _round(self, number: int, device: str, meter: Meter) -> Round:
        progress, subject = self._progress, self._subject
        replica = subject.replica
        progress.stage(number, "settling")
        if not (self._ours and device == HOST):  # what counts there is told apart, and gone with its process
            meter.note_baseline(await meter.settle(_STEADY_BEFORE, _SETTLE_LIMIT))

        def look() -> None:
            meter.watch(replica.pid)
            progress.tick(meter.now, replica.life.progress if replica.life is not None else 0.0)

        progress.stage(number, "loading")
        meter.begin()
        await subject.load(device, look)
        load = await meter.end()
        progress.stage(number, "serving")
        meter.begin()
        async with _ticking(lambda: progress.tick(meter.now)):
            for turn in range(self._asked.requests):
                await self._work.run(turn)
        run = await meter.end()
        subject.check()  # whoever died meanwhile was not measured
        progress.stage(number, "unloading")
        await subject.unload(lambda: progress.tick(run.bytes))
        meter.watch(None)
        return Round(number, load, run, await self._residual(device, meter))

    async def _residual(self, device: str, meter: Meter) -> int:
        """Of a process that is gone nothing is left, however late the driver gives it back."""
        if self._ours and device == HOST:
            return 0
        left = await meter.settle(_STEADY_AFTER, _SETTLE_LIMIT)
        return 0 if self._ours else max(0, left - (meter.baseline or 0))


@contextlib.asynccontextmanager
async def _ticking(tick: Callable[[], None]) -> AsyncIterator[None]:
    """A context within which ``tick`` is called again and again."""

    async def go_on() -> None:
        while True:
            tick()
            await asyncio.sleep(_TICK)

    task = asyncio.create_task(go_on())
    try:
        yield
    finally:
        task.cancel()
