"""Subject: one replica of the model that is measured, outside of any server: loaded, unloaded, and gone in the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Final

from slimproc.cli.measuring.failures import CannotMeasure
from slimproc.config import Config, ModelConfig
from slimproc.fleet import Fleet
from slimproc.metrics import Metrics
from slimproc.replicas.replica import Replica
from slimproc.replicas.states import ReplicaState

_TICK: Final = 0.01
"""Seconds between two looks at a replica that changes."""
_EXIT_LIMIT: Final = 1.5
"""Seconds that an engine has to exit when the measurement is broken off."""
_OVER: Final = (ReplicaState.BACKOFF, ReplicaState.FAILED)


class Subject:
    """``keep`` is a task; ``close`` ends what it keeps. A replica that fails stays down, so that its reason can be told."""

    def __init__(self, config: Config, model: ModelConfig, environ: Mapping[str, str]) -> None:
        self.model = model
        self._drain_limit = config.drain_timeout
        self._fleet = Fleet(config, Metrics({model.name: model}), environ, on_change=self._note)
        self._changed = asyncio.Event()
        self._kept = False
        self.replica = self._fleet.replicas(model)[0]
        self.replica.may_start = lambda _: False

    def _note(self, _: Replica) -> None:
        self._changed.set()

    async def keep(self) -> None:
        """Own the replica, and watch its server where it lives without us, until cancelled."""
        self._kept = True
        try:
            async with asyncio.TaskGroup() as owners:
                owners.create_task(self.replica.run(), name="owner")
                owners.create_task(self.replica.watch(), name="watcher")
        finally:
            self._kept = False
            self._changed.set()

    async def load(self, device: str | None, on_tick: Callable[[], None]) -> None:
        """Returns when it is ready. ``on_tick`` is called all the time until then. Raises CannotMeasure."""
        self.replica.ask_start(device=device)
        await self._until(lambda: self.replica.state in (ReplicaState.READY, *_OVER), on_tick)
        on_tick()
        self.check()

    def check(self) -> None:
        """Raise CannotMeasure unless it is ready."""
        if self.replica.state is not ReplicaState.READY:
            raise CannotMeasure(f"{self.model.name}: {self.replica.reason or f'it is {self.replica.state.value}'}")

    async def unload(self, on_tick: Callable[[], None]) -> None:
        """Returns when it is out of memory. Raises CannotMeasure where it stays."""
        self.check()
        self.replica.ask_stop(self._drain_limit)
        await self._until(self._is_down, on_tick)
        if self.replica.unload_failed:
            raise CannotMeasure(f"{self.model.name}: {self.replica.unload_failed}")

    def _is_down(self) -> bool:
        """Or will not go down."""
        return self.replica.state is ReplicaState.STOPPED or bool(self.replica.unload_failed)

    async def seen(self, limit: float) -> str:
        """The state of a server that lives without us, once it was asked; empty for what is ours."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await self._until(lambda: self.replica.sighting is None or self.replica.sighting.asked, lambda: None)
        return self.replica.sighting.state if self.replica.sighting is not None else ""

    async def _until(self, condition: Callable[[], bool], on_tick: Callable[[], None]) -> None:
        while not condition():
            on_tick()
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK):
                    await self._changed.wait()

    async def close(self) -> None:
        """Whatever it does: what is ours ends, and a server that lives without us unloads what we had it load."""
        replica = self.replica
        await asyncio.sleep(0)  # what was asked for in this very turn is heard before
        killable = replica.life is None or replica.life.killable
        replica.ask_stop(0.0, _EXIT_LIMIT if killable else None)
        await self._until(lambda: self._is_down() or not self._kept, lambda: None)
        replica.ask_stop(0.0, _EXIT_LIMIT, leave=True)
        await self._until(lambda: replica.state is ReplicaState.STOPPED or not self._kept, lambda: None)

    async def release(self) -> None:
        """After ``close``: give back the connections."""
        await self._fleet.close()

    def kill(self) -> None:
        """At once, without waiting for anything."""
        if self.replica.life is not None:
            self.replica.life.kill()
