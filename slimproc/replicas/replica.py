"""Replica: one running copy of a model. Its one owner task (``run``) moves it through the table of ``states.py``.

Others ask (``ask_start``, ``ask_stop``) and read; a state read outside the owner is stale when it is used, so whoever
takes a slot does it in the same turn of the loop and lives with an engine that dies in the next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from slimproc import logs
from slimproc.metrics import ModelMetrics
from slimproc.replicas.incarnation import Incarnation
from slimproc.replicas.limits import ReplicaLimits, ReplicaStatistics
from slimproc.replicas.restart import RestartPolicy
from slimproc.replicas.states import RUNNING, ReplicaEvent, ReplicaState, next_state
from slimproc.settings import EngineSettings

log = logs.get("slimproc.replica")

_DOWNWARD = frozenset({ReplicaState.STOPPED, ReplicaState.DRAINING, ReplicaState.STOPPING})


class _Heard(NamedTuple):
    event: ReplicaEvent
    engine: Incarnation | None
    detail: str


class Replica:
    """``on_change`` is called after every change of state and whenever a slot becomes free."""

    def __init__(
        self,
        index: int,
        settings: EngineSettings,
        limits: ReplicaLimits,
        metrics: ModelMetrics,
        *,
        on_change: Callable[[Replica], None],
        policy: RestartPolicy | None = None,
    ) -> None:
        self.model = settings.model
        self.index = index
        self.name = f"{settings.model}/{index}"
        self.state = ReplicaState.STOPPED
        self.reason = ""
        """Why the last engine is no more, or cannot be; empty while all is well."""
        self.load_failed = False
        """The last engine never became ready."""
        self.restarts = 0
        self.changed_at = time.monotonic()
        self._settings = settings
        self._limits = limits
        self._metrics = metrics
        self._on_change = on_change
        self._policy = policy or RestartPolicy()
        self._mailbox: asyncio.Queue[_Heard] = asyncio.Queue()
        self._engine: Incarnation | None = None
        self._permanent = False
        self._start_wanted = False
        self._drain_until = 0.0
        self._exit_limit = limits.unload_timeout
        self._tokens_before = 0
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Replica {self.name} {self.state.value}, {self.sequences} sequences>"

    # --- what others may do ---------------------------------------------------------------------------------------

    def ask_start(self, *, forgive: bool = False) -> None:
        """Start it if it is stopped or has failed. ``forgive``: an operator asks, so earlier failures do not count."""
        if forgive:
            self._policy.reset()
        self._post(ReplicaEvent.START_ASKED, None, "")

    def ask_stop(self, drain_limit: float, exit_limit: float | None = None) -> None:
        """Stop it: what is in flight may take ``drain_limit`` more seconds, the engine's exit then ``exit_limit``
        (default: ``unload_timeout``). Asking again only moves the limits.
        """
        self._drain_until = time.monotonic() + drain_limit
        self._exit_limit = self._limits.unload_timeout if exit_limit is None else exit_limit
        self._post(ReplicaEvent.STOP_ASKED, None, "")
        if self.state is ReplicaState.DRAINING:
            self._post(ReplicaEvent.DRAINED, self._engine, "")

    async def wait_stopped(self) -> None:
        while self.state is not ReplicaState.STOPPED:
            self._changed.clear()
            await self._changed.wait()

    @property
    def serving(self) -> Incarnation | None:
        """The engine that takes new sequences now, if there is one."""
        return self._engine if self.state is ReplicaState.READY else None

    @property
    def engine(self) -> Incarnation | None:
        return self._engine

    @property
    def sequences(self) -> int:
        return self._engine.in_flight if self._engine else 0

    def served(self) -> None:
        """A request has finished well here."""
        if self._engine is not None and self._engine.ready is not None:
            self._policy.served(self._engine.ready_since, time.monotonic())

    def statistics(self) -> ReplicaStatistics:
        engine = self._engine
        ready = engine.ready if engine else None
        return ReplicaStatistics(
            model=self.model,
            replica=self.index,
            state=self.state.value,
            reason=self.reason,
            progress=1.0 if ready else (engine.progress if engine else 0.0),
            pid=engine.process.pid if engine else None,
            sequences=self.sequences,
            slots=ready.model.slots if ready else self._settings.slots,
            tokens=self._tokens_before + (engine.tokens if engine else 0),
            restarts=self.restarts,
            since=time.monotonic() - self.changed_at,
        )

    # --- the owner ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Own the replica until cancelled. Left with an engine (which an orderly stop never does), it kills it."""
        behaviour = {
            ReplicaState.STOPPED: self._while_stopped,
            ReplicaState.STARTING: self._while_starting,
            ReplicaState.READY: self._while_ready,
            ReplicaState.DRAINING: self._while_draining,
            ReplicaState.STOPPING: self._while_stopping,
            ReplicaState.KILLING: self._while_killing,
            ReplicaState.BACKOFF: self._while_backing_off,
            ReplicaState.FAILED: self._while_stopped,
        }
        try:
            while True:
                await behaviour[self.state]()
        finally:
            if self._engine is not None:
                self._engine.kill()

    async def _while_stopped(self) -> None:
        """STOPPED and FAILED: nothing runs."""
        if self._start_wanted:
            self._start_wanted = False
            await asyncio.sleep(0)  # whoever waits for STOPPED sees it
            self._enter(ReplicaEvent.START_ASKED)
            return
        heard = await self._hear()
        assert heard is not None
        self._enter(heard.event)

    async def _while_starting(self) -> None:
        self._permanent = False
        try:
            self._engine = Incarnation(
                self.name,
                self.index,
                self._settings,
                self._limits.engine,
                self._metrics,
                post=self._post,
                on_slot_free=self._slot_is_free,
            )
        except OSError as error:
            self._died(f"the engine could not be started: {error}", "load_failed")
            self._enter(ReplicaEvent.EXITED)
            return
        heard = await self._hear(self._limits.load_timeout)
        if heard is None:
            self._died(f"the model did not load within {self._limits.load_timeout:g} s", "load_timeout")
            self._enter(ReplicaEvent.TIMED_OUT)
        elif heard.event is ReplicaEvent.READY_RECEIVED:
            self._became_ready()
            self._enter(heard.event)
        elif heard.event is ReplicaEvent.EXITED:
            self._died(self._refusal() or heard.detail, "load_failed")
            self._bury()
            self._enter(heard.event)
        else:
            if heard.event is ReplicaEvent.CORRUPT:
                self._died(heard.detail, "corrupt")
            self._enter(heard.event)

    async def _while_ready(self) -> None:
        heard = await self._hear()
        assert heard is not None
        if heard.event is ReplicaEvent.EXITED:
            self._died(heard.detail, "exited")
            self._bury()
        elif heard.event is ReplicaEvent.STALLED:
            self._died(heard.detail, "stalled")
        elif heard.event is ReplicaEvent.CORRUPT:
            self._died(heard.detail, "corrupt")
        self._enter(heard.event)

    async def _while_draining(self) -> None:
        assert self._engine is not None
        while self._engine.occupied:
            heard = await self._hear(self._drain_until - time.monotonic())
            if heard is None:
                self._enter(ReplicaEvent.TIMED_OUT)
                return
            if heard.event is ReplicaEvent.DRAINED:
                continue  # a slot was freed, or the limit was moved: look again
            if heard.event is ReplicaEvent.EXITED:
                self.reason = heard.detail
                self._bury()
            self._enter(heard.event)
            return
        self._enter(ReplicaEvent.DRAINED)

    async def _while_stopping(self) -> None:
        """Ask, then SIGTERM, then SIGKILL, within the exit limit; what is still in flight ends with the engine."""
        assert self._engine is not None
        self._engine.ask_to_exit()
        if self._engine.ready is None:
            self._engine.terminate()  # it loads, and hears nothing until that is done
        for escalate in (self._engine.terminate, self._engine.kill):
            if await self._hear_exit(self._exit_limit / 2):
                return
            log.warning("an engine does not stop", replica=self.name, next=escalate.__name__)
            escalate()
        await self._hear_exit(None)

    async def _while_killing(self) -> None:
        assert self._engine is not None
        self._engine.kill()
        await self._hear_exit(None)

    async def _hear_exit(self, limit: float | None) -> bool:
        """Wait for EXITED, which ends STOPPING and KILLING; STOP_ASKED moves KILLING to STOPPING on the way."""
        deadline = None if limit is None else time.monotonic() + limit
        while True:
            heard = await self._hear(None if deadline is None else deadline - time.monotonic())
            if heard is None:
                return False
            if heard.event is ReplicaEvent.EXITED:
                self._bury()
                self._enter(heard.event)
                return True
            if heard.event is ReplicaEvent.STOP_ASKED and self.state is ReplicaState.KILLING:
                self._enter(heard.event)
            # Anything else is what a process says on its way out; nobody listens any more.

    async def _while_backing_off(self) -> None:
        wait = self._policy.failed(time.monotonic(), permanent=self._permanent)
        if wait is None:
            log.error("a replica has failed for good", replica=self.name, reason=self.reason)
            self._enter(ReplicaEvent.GAVE_UP)
            return
        heard = await self._hear(wait)
        if heard is None:
            self.restarts += 1
            self._enter(ReplicaEvent.BACKOFF_ELAPSED)
        else:
            self._enter(heard.event)

    # --- hearing and entering ---------------------------------------------------------------------------------------

    async def _hear(self, limit: float | None = None) -> _Heard | None:
        """The next event that matters in this state, or None when ``limit`` seconds have passed."""
        try:
            async with asyncio.timeout(None if limit is None else max(0.0, limit)):
                while True:
                    heard = await self._mailbox.get()
                    if self._matters(heard):
                        return heard
        except TimeoutError:
            return None

    def _matters(self, heard: _Heard) -> bool:
        if heard.engine is not None and heard.engine is not self._engine:
            return False  # news of an engine that is gone
        if heard.event is ReplicaEvent.DRAINED:
            return self.state is ReplicaState.DRAINING
        if heard.event is ReplicaEvent.STOP_ASKED:
            self._start_wanted = False
            return self.state not in _DOWNWARD
        if heard.event is ReplicaEvent.START_ASKED:
            self._start_wanted = self.state in _DOWNWARD and self.state is not ReplicaState.STOPPED
            return self.state in (ReplicaState.STOPPED, ReplicaState.FAILED)
        return True

    def _post(self, event: ReplicaEvent, engine: Incarnation | None, detail: str) -> None:
        self._mailbox.put_nowait(_Heard(event, engine, detail))

    def _slot_is_free(self) -> None:
        if self.state is ReplicaState.DRAINING:
            self._post(ReplicaEvent.DRAINED, self._engine, "")
        self._on_change(self)

    def _enter(self, event: ReplicaEvent) -> None:
        before, self.state = self.state, next_state(self.state, event)
        self.changed_at = time.monotonic()
        log.info(
            "a replica changes",
            replica=self.name,
            before=before.value,
            after=self.state.value,
            event=event.value,
            reason=self.reason or None,
        )
        self._changed.set()
        self._on_change(self)

    # --- what an engine's life and death leave behind -----------------------------------------------------------------

    def _became_ready(self) -> None:
        assert self._engine is not None
        ready = self._engine.ready
        assert ready is not None
        self.reason = ""
        self.load_failed = False
        self._metrics.loads["ok"] += 1
        self._metrics.load_seconds.observe(ready.load_seconds)

    def _refusal(self) -> str:
        """What the engine itself said against this model, if it did."""
        refused = self._engine.refused if self._engine else None
        if refused is None:
            return ""
        self._permanent = refused.permanent
        return refused.message

    def _died(self, reason: str, kind: str) -> None:
        self.reason = reason
        self.load_failed = self.state is ReplicaState.STARTING
        if self.load_failed:
            self._metrics.loads["failed"] += 1
        self._metrics.engine_restarts[kind] += 1
        log.warning("an engine is lost", replica=self.name, reason=reason, kind=kind)

    def _bury(self) -> None:
        """After EXITED: what it had is delivered or failed, and nothing of it is kept but its count of tokens."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.bury(self.reason or str(engine.status))
            self._tokens_before += engine.tokens

    @property
    def has_process(self) -> bool:
        return self.state in RUNNING
