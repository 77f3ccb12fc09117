"""A replica with a real engine process of the fake backend, and what tests ask of it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from slimproc.ipc.credit import default_credit
from slimproc.ipc.wire import Submit
from slimproc.metrics import ModelMetrics
from slimproc.replicas.incarnation import Incarnation
from slimproc.replicas.limits import EngineLimits, ReplicaLimits
from slimproc.replicas.local import engine_replica
from slimproc.replicas.replica import Replica
from slimproc.replicas.restart import RestartPolicy
from slimproc.replicas.states import ReplicaState
from slimproc.settings import EngineSettings, FakeSettings
from tests.fakes import LIMIT, RecordingStream, eventually


class Keeper:
    """``async with`` starts the owner task, and at its end stops the replica and gives everything back."""

    def __init__(
        self,
        *,
        slots: int = 2,
        load_timeout: float = LIMIT,
        unload_timeout: float = LIMIT,
        stall_timeout: float = LIMIT,
        cancel_grace: float = LIMIT,
        credit: str | None = None,
        environ: dict[str, str] | None = None,
        policy: RestartPolicy | None = None,
        backend: str = "fake",
        **fake: Any,
    ) -> None:
        self.metrics = ModelMetrics()
        self.states: list[ReplicaState] = [ReplicaState.STOPPED]
        self.changes = 0
        engine = EngineLimits(
            ring_size=1 << 16,
            credit=credit or default_credit(),
            stall_timeout=stall_timeout,
            cancel_grace=cancel_grace,
            environ=dict(os.environ) if environ is None else environ,
        )
        self.replica = engine_replica(
            0,
            EngineSettings(model="m", backend=backend, slots=slots, fake=FakeSettings(**fake)),
            ReplicaLimits(load_timeout, unload_timeout),
            engine,
            self.metrics,
            on_change=self._on_change,
            policy=policy or RestartPolicy(first_wait=0.0, limit=1000),
        )
        self.owner: asyncio.Task[None] | None = None

    def _on_change(self, replica: Replica) -> None:
        self.changes += 1
        if replica.state is not self.states[-1]:
            self.states.append(replica.state)

    async def __aenter__(self) -> Self:
        self.owner = asyncio.create_task(self.replica.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.owner is not None
        if self.owner.done():
            assert self.owner.cancelled(), self.owner.exception()
            return
        if self.replica.state is not ReplicaState.STOPPED:
            if self.replica.engine is not None:
                self.replica.engine.kill()
            await self.stop()
        self.owner.cancel()
        await asyncio.wait({self.owner})

    # --- asking -------------------------------------------------------------------------------------------------------

    async def start(self) -> Incarnation:
        self.replica.ask_start()
        return await self.until_ready()

    async def stop(self, drain_limit: float = 0.0, exit_limit: float | None = None) -> None:
        self.replica.ask_stop(drain_limit, exit_limit)
        async with asyncio.timeout(LIMIT):
            await self.replica.wait_stopped()

    def generate(self, prompt: str = "hello", max_tokens: int | None = 4, **fields: Any) -> RecordingStream:
        """Start a sequence in the engine that serves; its stream."""
        return self.begin(prompt, max_tokens, **fields)[0]

    def begin(self, prompt: str = "hello", max_tokens: int | None = 4, **fields: Any) -> tuple[RecordingStream, Any]:
        """The same with its slot, which can cancel it."""
        engine = self.replica.serving_engine
        assert engine is not None
        stream, slot = RecordingStream(), engine.take_slot()
        slot.start(stream, lambda rid: Submit(rid=rid, prompt=prompt, max_tokens=max_tokens, **fields))
        return stream, slot

    # --- waiting ------------------------------------------------------------------------------------------------------

    async def until(self, state: ReplicaState) -> None:
        await self._eventually(lambda: self.replica.state is state, f"{self.replica} is {state.value}: {self.states}")

    async def _eventually(self, condition: Callable[[], bool], what: str) -> None:
        """An owner that has fallen is told at once."""
        fallen = lambda: self.owner is not None and self.owner.done()  # noqa: E731
        await eventually(lambda: condition() or fallen(), what)
        assert not fallen(), self.owner

    async def until_ready(self, after: Incarnation | None = None) -> Incarnation:
        """Wait for an engine that serves, and is not ``after``."""
        await self._eventually(
            lambda: self.replica.serving not in (None, after), f"{self.replica} serves: {self.replica.reason}"
        )
        assert self.replica.serving_engine is not None
        return self.replica.serving_engine


def script(**fields: Any) -> str:
    """A prompt that scripts the fake backend."""
    return "!fake " + json.dumps(fields)


def exists(pid: int) -> bool:
    """A zombie exists."""
    return Path(f"/proc/{pid}").exists()
