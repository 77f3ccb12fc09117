"""A replica that is an upstream, with its owner and its watcher, and what tests ask of it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from slimproc.config.upstream import Command, Remote
from slimproc.metrics import ModelMetrics
from slimproc.replicas.life import Life
from slimproc.replicas.replica import Replica
from slimproc.replicas.states import ReplicaState
from slimproc.upstream.life import Pace
from slimproc.upstream.replicas import UpstreamLimits, Upstreams
from slimproc.upstream.slot import UpstreamSlot
from tests.fakes import LIMIT, eventually

HASTE = Pace(loading=0.01, serving=0.02, draining=0.01, between=0.02, stuck=0.02, given_up=0.2, settle=0.4)


class UpstreamKeeper:
    """``async with`` starts the owner and, unless ``watched`` is False, the watcher; at its end the server is let go."""

    def __init__(
        self,
        how: Remote | Command,
        *,
        concurrency: int = 2,
        load_timeout: float = LIMIT,
        unload_timeout: float = LIMIT,
        prepare_timeout: float = LIMIT,
        status_timeout: float = LIMIT,
        environ: Mapping[str, str] | None = None,
        pace: Pace = HASTE,
        watched: bool = True,
    ) -> None:
        self.metrics = ModelMetrics()
        self.states: list[ReplicaState] = [ReplicaState.STOPPED]
        self.changes = 0
        self.upstreams = Upstreams(dict(os.environ) if environ is None else environ, pace=pace)
        limits = UpstreamLimits(concurrency, load_timeout, unload_timeout, prepare_timeout, status_timeout)
        self.replicas = self.upstreams.replicas("m", how, limits, self.metrics, on_change=self._on_change)
        self.replica = self.replicas[0]
        self._watched = watched
        self._tasks: list[asyncio.Task[None]] = []

    def _on_change(self, replica: Replica) -> None:
        self.changes += 1
        if replica is self.replica and replica.state is not self.states[-1]:
            self.states.append(replica.state)

    async def __aenter__(self) -> Self:
        for replica in self.replicas:
            self._tasks.append(asyncio.create_task(replica.run()))
            if self._watched:
                self._tasks.append(asyncio.create_task(replica.watch()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        fallen = [task for task in self._tasks if task.done() and task.exception()]
        assert not fallen, fallen
        for replica in self.replicas:
            replica.ask_stop(0.0, 5.0, leave=True)
        async with asyncio.timeout(LIMIT):
            for replica in self.replicas:
                await replica.wait_stopped()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self.upstreams.close()

    # --- asking and waiting -------------------------------------------------------------------------------------------

    async def start(self) -> Life:
        self.replica.ask_start()
        return await self.until_ready()

    async def stop(self, drain_limit: float = LIMIT) -> None:
        self.replica.ask_stop(drain_limit)
        async with asyncio.timeout(LIMIT):
            await self.replica.wait_stopped()

    def take(self) -> UpstreamSlot:
        assert self.replica.serving is not None
        slot: Any = self.replica.serving.take_slot()
        assert isinstance(slot, UpstreamSlot)
        return slot

    async def until(self, state: ReplicaState) -> None:
        await eventually(lambda: self.replica.state is state, f"{self.replica} is {state.value}: {self.states}")

    async def until_ready(self, after: Life | None = None, limit: float = LIMIT) -> Life:
        await eventually(
            lambda: self.replica.serving not in (None, after),
            f"{self.replica} serves, after {self.states}: {self.replica.reason}",
            limit,
        )
        assert self.replica.serving is not None
        return self.replica.serving

    async def until_seen(self, state: str) -> None:
        sighting = lambda: self.replica.sighting  # noqa: E731
        await eventually(lambda: sighting() and sighting().state == state, f"it is seen as {state}")


def remote(*urls: str, **fields: Any) -> Remote:
    return Remote(base_urls=urls, **fields)


def closed_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port: int = trial.getsockname()[1]
        return port
