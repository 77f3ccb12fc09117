"""ReplicaOwner: the one task that moves a replica through the table of ``states.py``, and what it remembers."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import NamedTuple

from slimproc import logs
from slimproc.metrics import ModelMetrics
from slimproc.replicas.exits import ExitStatus
from slimproc.replicas.life import Life, LifeSource
from slimproc.replicas.limits import ReplicaLimits
from slimproc.replicas.restart import RestartPolicy
from slimproc.replicas.states import ReplicaEvent, ReplicaState, next_state

log = logs.get("slimproc.replica")

ABANDONABLE = "abandonable"
"""The detail of a STOP_ASKED whose drain may be given up."""
KILL_LIMIT = 10.0
"""Seconds that a process has to end after it was killed before it is told of: to give back much memory takes some."""
PERMISSION_INTERVAL = 0.25
"""Seconds between two looks whether a restart that is due may begin."""
_GIVEN_UP = {
    ReplicaEvent.CORRUPT: "corrupt",
    ReplicaEvent.STALLED: "stalled",
    ReplicaEvent.DEVICE_LOST: "device_lost",
}
"""Why a life that still runs is of no more use; as ``metrics.RESTARTS`` calls it."""
_TRIED_AGAIN = frozenset({ReplicaEvent.EXITED, ReplicaEvent.BACKOFF_ELAPSED})
_DOWNWARD = frozenset({ReplicaState.STOPPED, ReplicaState.DRAINING, ReplicaState.STOPPING})


class _Heard(NamedTuple):
    event: ReplicaEvent
    life: Life | None
    detail: str


class ReplicaOwner(ABC):
    """Everything with a leading underscore belongs to the owner task, ``run``."""

    def __init__(
        self, name: str, source: LifeSource, limits: ReplicaLimits, metrics: ModelMetrics, policy: RestartPolicy
    ) -> None:
        self.name = name
        self.state = ReplicaState.STOPPED
        self.reason = ""
        """Why the last life is no more, or cannot be; empty while all is well."""
        self.stuck = ""
        """Why what it runs cannot be ended, not even by SIGKILL; empty while that is not so."""
        self.load_failed = False
        """The last life never became ready."""
        self.ended_by_oom = False
        """The last life was ended by the kernel because memory ran out."""
        self.short_of_memory = 0
        """Loads in a row, since it was last asked to start, that did not get the memory they wanted."""
        self.restarts = 0
        self.changed_at = time.monotonic()
        self.device: str | None = None
        """Where it was last started; None: wherever it liked."""
        self.resident_since = 0.0
        """When it last became ready (monotonic seconds)."""
        self.idle_since = 0.0
        """When its last slot was given back, or it last became ready (monotonic seconds)."""
        self.drain_timed_out = False
        """Its last drain was given up because its requests took longer than the limit."""
        self._source = source
        self._limits = limits
        self._metrics = metrics
        self._policy = policy
        self._mailbox: asyncio.Queue[_Heard] = asyncio.Queue()
        self._life: Life | None = None
        self._permanent = False
        self._made_from: Hashable = None
        self._start_wanted: _Heard | None = None
        self._abandonable = False
        self._leaving = False
        self._quiet = False
        """It fails again for the reason that it failed for before, which is in the log."""
        self._drain_until = 0.0
        self._exit_limit = limits.unload_timeout
        self._tokens_before = 0
        self._changed = asyncio.Event()

    @abstractmethod
    def _may_start(self) -> bool:
        """Whether a restart that is due may begin."""

    @abstractmethod
    def _tell(self) -> None:
        """Tell whoever looks at this replica that something has changed."""

    async def run(self) -> None:
        """Own the replica until cancelled. Left with a life (which an orderly stop never does), it kills it."""
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
            if self._life is not None:
                self._life.let_go()
                self._life.kill()

    # --- one method per state -----------------------------------------------------------------------------------------

    async def _while_stopped(self) -> None:
        """STOPPED and FAILED: nothing runs."""
        if self._start_wanted is not None:
            heard, self._start_wanted = self._start_wanted, None
            await asyncio.sleep(0)  # whoever waits for STOPPED sees it
        else:
            heard = await self._must_hear()
        if heard.event is ReplicaEvent.START_ASKED:
            self.short_of_memory = 0
            self.device = heard.detail or self.device
        self._enter(heard.event)

    async def _while_starting(self) -> None:
        self._permanent = False
        self._made_from = self._source.made_from()
        try:
            self._life = self._source.start(
                device=self.device, post=self._post, on_slot_free=self._slot_is_free, on_news=self._tell
            )
        except OSError as error:
            self._died(f"it could not be started: {error}", "load_failed")
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
            oom = self._ended_by_oom()
            self._died(self._refusal() or heard.detail, "oom" if oom else "load_failed")
            if oom or self._refused_for_memory():
                self.short_of_memory += 1
                self.load_failed = False  # who waits for it goes on waiting, for another try or for residency's word
            self._bury()
            self._enter(heard.event)
        else:
            if heard.event in _GIVEN_UP:
                self._died(heard.detail, _GIVEN_UP[heard.event])
                self.load_failed = heard.event is not ReplicaEvent.DEVICE_LOST  # it may be loaded on another
            self._enter(heard.event)

    async def _while_ready(self) -> None:
        heard = await self._must_hear()
        if heard.event is ReplicaEvent.EXITED:
            self._died(heard.detail, "oom" if self._ended_by_oom() else "exited")
            self._bury()
        elif heard.event in _GIVEN_UP:
            self._died(heard.detail, _GIVEN_UP[heard.event])
        self._enter(heard.event)

    async def _while_draining(self) -> None:
        life = self._life
        assert life is not None
        self.drain_timed_out = False
        life.drain(begin=True)
        while not self._is_drained(life) or not self._mailbox.empty():
            heard = await self._hear(0.0 if self._is_drained(life) else self._drain_until - time.monotonic())
            if heard is None:
                if self._is_drained(life):
                    break
                self._end_drain_at_its_limit(life)
                return
            if heard.event in (ReplicaEvent.DRAINED, ReplicaEvent.STOP_ASKED):
                continue  # a slot was freed, or the limit was moved: look again
            if heard.event is ReplicaEvent.DRAIN_ABANDONED:
                life.drain(begin=False)
            elif heard.event is ReplicaEvent.EXITED:
                self.reason = heard.detail
                self._bury()
            self._enter(heard.event)
            return
        self._enter(ReplicaEvent.DRAINED)

    def _is_drained(self, life: Life) -> bool:
        """What is left as it is may be busy with others' work: ours alone is waited for."""
        return life.drained or (self._leaving and not life.occupied)

    def _end_drain_at_its_limit(self, life: Life) -> None:
        if not self._abandonable:
            self._enter(ReplicaEvent.TIMED_OUT)
            return
        self.drain_timed_out = True
        life.drain(begin=False)
        self._enter(ReplicaEvent.DRAIN_ABANDONED)

    async def _while_stopping(self) -> None:
        """Ask, then SIGTERM, then SIGKILL, within the exit limit; what is still in flight ends with the life."""
        life = self._life
        assert life is not None
        if self._leaving:
            life.let_go()
        life.ask_to_exit()
        for escalate in (life.terminate, life.kill) if life.killable else ():
            if await self._hear_exit(self._exit_limit / 2):
                return
            log.warning("an engine does not stop", replica=self.name, next=escalate.__name__)
            escalate()
        await self._hear_end(life)

    async def _while_killing(self) -> None:
        assert self._life is not None
        self._life.kill()
        await self._hear_end(self._life)

    async def _hear_end(self, life: Life) -> None:
        """Wait for EXITED, the last that can be done. Who hangs in the kernel, or in a driver, is not ended by SIGKILL:
        then only its replica goes on waiting.
        """
        if life.killable:
            if await self._hear_exit(KILL_LIMIT):
                return
            self.stuck = f"process {life.pid} does not end after SIGKILL (stuck in the kernel or in a driver?)"
            log.error("a process does not end", replica=self.name, pid=life.pid, reason=self.stuck)
            life.give_up(self.reason or self.stuck)
            self._changed.set()
            self._tell()
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
        wait = self._policy.failed(time.monotonic(), permanent=self._permanent, loading=self.load_failed)
        if wait is None:
            log.error("a replica has failed for good", replica=self.name, reason=self.reason)
            self._enter(ReplicaEvent.GAVE_UP)
            return
        heard = await self._hear(wait)
        while heard is None and not self._may_start():
            heard = await self._hear(PERMISSION_INTERVAL)
        if heard is None:
            self.restarts += 1
            self._enter(ReplicaEvent.BACKOFF_ELAPSED)
        else:
            self._enter(heard.event)

    # --- hearing and entering -----------------------------------------------------------------------------------------

    async def _must_hear(self) -> _Heard:
        heard = await self._hear()
        assert heard is not None, "without a limit"
        return heard

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
        if heard.life is not None and heard.life is not self._life:
            return False  # news of a life that is over
        draining = self.state is ReplicaState.DRAINING
        match heard.event:
            case ReplicaEvent.DRAINED:
                return draining
            case ReplicaEvent.DRAIN_ABANDONED:
                return draining and self._abandonable
            case ReplicaEvent.STOP_ASKED:
                self._start_wanted = None
                abandonable = heard.detail == ABANDONABLE
                self._abandonable = abandonable and self._abandonable if draining else abandonable
                return draining or self.state not in _DOWNWARD
            case ReplicaEvent.START_ASKED:
                self._start_wanted = heard if self.state in (ReplicaState.DRAINING, ReplicaState.STOPPING) else None
                return self.state in (ReplicaState.STOPPED, ReplicaState.FAILED)
        return True

    def _post(self, event: ReplicaEvent, life: Life | None, detail: str) -> None:
        self._mailbox.put_nowait(_Heard(event, life, detail))

    def _slot_is_free(self) -> None:
        self.idle_since = time.monotonic()
        if self.state is ReplicaState.DRAINING:
            self._post(ReplicaEvent.DRAINED, self._life, "")
        self._tell()

    def _enter(self, event: ReplicaEvent) -> None:
        before, self.state = self.state, next_state(self.state, event)
        self.changed_at = time.monotonic()
        write = log.debug if self._quiet and event in _TRIED_AGAIN else log.info
        write(
            "a replica changes",
            replica=self.name,
            before=before.value,
            after=self.state.value,
            event=event.value,
            reason=self.reason or None,
        )
        self._changed.set()
        self._tell()

    # --- what a life and its end leave behind -------------------------------------------------------------------------

    def _became_ready(self) -> None:
        assert self._life is not None
        self._policy.loaded()
        self.reason = ""
        self._quiet = self.load_failed = False
        self.short_of_memory = 0
        self.resident_since = self.idle_since = time.monotonic()
        self._metrics.loads["ok"] += 1
        self._metrics.load_seconds.observe(self._life.load_seconds)

    def _refusal(self) -> str:
        """What it said itself against this model, if it did."""
        refused = self._life.refused if self._life else None
        if refused is None:
            return ""
        self._permanent = refused.permanent
        return refused.message

    def _refused_for_memory(self) -> bool:
        refused = self._life.refused if self._life else None
        return refused is not None and refused.scarce

    def _ended_by_oom(self) -> bool:
        status = self._life.status if self._life else None
        return isinstance(status, ExitStatus) and status.oom

    def _died(self, reason: str, kind: str) -> None:
        self._quiet = self._policy.endless and reason == self.reason
        self.reason = reason
        self.load_failed = self.state is ReplicaState.STARTING
        self.ended_by_oom = kind == "oom"
        if self.load_failed:
            self._metrics.loads["failed"] += 1
        self._metrics.engine_restarts[kind] += 1
        write = log.debug if self._quiet else log.warning
        write("an engine is lost", replica=self.name, reason=reason, kind=kind)

    def _bury(self) -> None:
        """After EXITED: what it had is delivered or failed, and nothing of it is kept but its count of tokens."""
        life, self._life = self._life, None
        self.stuck = ""
        if life is not None:
            life.bury(self.reason or str(life.status))
            self._tokens_before += life.tokens
