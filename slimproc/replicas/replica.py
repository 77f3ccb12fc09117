"""Replica: one running copy of a model, as everybody but its owner task (``owner.py``) sees it.

Others ask (``ask_start``, ``ask_stop``) and read; a state read outside the owner is stale when it is used, so whoever
takes a slot does it in the same turn of the loop and lives with an engine that dies in the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from slimproc.metrics import ModelMetrics
from slimproc.replicas.incarnation import Incarnation
from slimproc.replicas.life import Life, LifeSource, Sighting
from slimproc.replicas.limits import ReplicaLimits, ReplicaStatistics
from slimproc.replicas.owner import ABANDONABLE, ReplicaOwner
from slimproc.replicas.restart import RestartPolicy
from slimproc.replicas.states import RUNNING, ReplicaEvent, ReplicaState


class Replica(ReplicaOwner):
    """``on_change`` is called after every change of state and whenever a slot becomes free."""

    def __init__(
        self,
        model: str,
        index: int,
        source: LifeSource,
        limits: ReplicaLimits,
        metrics: ModelMetrics,
        *,
        on_change: Callable[[Replica], None],
        policy: RestartPolicy | None = None,
    ) -> None:
        """``source`` makes what it runs."""
        super().__init__(f"{model}/{index}", source, limits, metrics, policy or RestartPolicy())
        self.model = model
        self.index = index
        self.may_start: Callable[[Replica], bool] = _always
        """Asked when a restart is due, until it says yes: there may be no room for it any more."""
        self.on_unload_failed: Callable[[Replica], None] = _ignore
        """Called whenever ``unload_failed`` has got a reason."""
        self._unload_failed = ""
        self._on_change = on_change

    def __repr__(self) -> str:
        return f"<Replica {self.name} {self.state.value}, {self.sequences} sequences>"

    # --- what others may do ---------------------------------------------------------------------------------------

    def ask_start(self, *, forgive: bool = False, device: str | None = None) -> None:
        """Start it if it is stopped or has failed; on ``device``, if given, else where it was last.

        ``forgive``: an operator asks, so earlier failures do not count.
        """
        if forgive:
            self.forgive()
        self._leaving = False
        self._post(ReplicaEvent.START_ASKED, None, device or "")

    def forgive(self) -> None:
        """Its earlier failures do not count any more."""
        self._policy.reset()

    def ask_stop(
        self, drain_limit: float, exit_limit: float | None = None, *, abandon: bool = False, leave: bool = False
    ) -> None:
        """Stop it: what is in flight may take ``drain_limit`` more seconds, the engine's exit then ``exit_limit``
        (default: ``unload_timeout``). Asking again only moves the limits.

        ``abandon``: it is an eviction: when the drain limit passes, the drain is given up and it serves on
        (``drain_timed_out``), and ``abandon_drain`` may end it before. A stop without it rules out both.
        ``leave``: the server is going: what lives without us is left as it is, and not waited for.
        """
        self._drain_until = time.monotonic() + drain_limit
        self._exit_limit = self._limits.unload_timeout if exit_limit is None else exit_limit
        self._leaving = self._leaving or leave
        self._post(ReplicaEvent.STOP_ASKED, None, ABANDONABLE if abandon else "")
        if leave and self._life is not None and self.state is ReplicaState.STOPPING:
            self._life.let_go()

    def set_limits(self, limits: ReplicaLimits) -> None:
        """They hold from the next load and the next stop on."""
        self._limits = limits

    def abandon_drain(self) -> None:
        """Serve on, if it is still being drained and every stop that was asked since was an eviction."""
        self._post(ReplicaEvent.DRAIN_ABANDONED, None, "")

    def device_lost(self, reason: str) -> None:
        """The memory that it has is gone with its device: it is killed, if it can be, and what is in flight ends now."""
        if self._life is not None and self._life.killable:
            self._post(ReplicaEvent.DEVICE_LOST, self._life, reason)

    async def wait_stopped(self) -> None:
        while self.state is not ReplicaState.STOPPED:
            self._changed.clear()
            await self._changed.wait()

    async def wait_ended(self) -> None:
        """Until it has stopped, or it is known that nothing can end it."""
        while self.state is not ReplicaState.STOPPED and not self.stuck:
            self._changed.clear()
            await self._changed.wait()

    def served(self) -> None:
        """A request has finished well here."""
        if self._life is not None and self._life.is_ready:
            self._policy.served(self._life.ready_since, time.monotonic())

    # --- what others may see --------------------------------------------------------------------------------------

    @property
    def life(self) -> Life | None:
        """What it owns now, in whatever state."""
        return self._life

    @property
    def serving(self) -> Life | None:
        """The life that takes new work now, if there is one."""
        return self._life if self.state is ReplicaState.READY else None

    @property
    def engine(self) -> Incarnation | None:
        """Its life, if that is an engine of ours."""
        return self._life if isinstance(self._life, Incarnation) else None

    @property
    def serving_engine(self) -> Incarnation | None:
        """The engine of ours that takes new sequences now, if there is one."""
        return self.engine if self.state is ReplicaState.READY else None

    @property
    def sighting(self) -> Sighting | None:
        """What its server last said of itself, where that lives without us; None for what is ours."""
        return self._source.sighting

    @property
    def remains(self) -> str:
        """Why its memory may still be in use although it does not run; empty: it is not. Nothing of ours outlives us;
        a server that is not ours keeps what it had until it says that it has not.
        """
        seen = self._source.sighting
        if seen is None or not seen.may_hold_memory:
            return ""
        return f"its server is {seen.state}" + (f": {seen.reason}" if seen.reason else "")

    @property
    def renewed(self) -> bool:
        """It has failed, and would be made from something else by now: its file has come, or is another one."""
        return self.state is ReplicaState.FAILED and self._source.made_from() != self._made_from

    @property
    def resident_already(self) -> bool:
        """Its server is ready without a start of ours: one costs no load."""
        seen = self._source.sighting
        return seen is not None and seen.state == "ready"

    @property
    def pid(self) -> int | None:
        """The leader of its process group, where it has one."""
        return self._life.pid if self._life else None

    @property
    def occupied(self) -> int:
        return self._life.occupied if self._life else 0

    @property
    def sequences(self) -> int:
        return self._life.in_flight if self._life else 0

    @property
    def unload_failed(self) -> str:
        """Why it cannot be unloaded, while it is STOPPING or KILLING and that is so."""
        return self.stuck or (self._life.unload_failed if self._life else "")

    @property
    def has_process(self) -> bool:
        return self.state in RUNNING

    def statistics(self) -> ReplicaStatistics:
        life = self._life
        ready = life is not None and life.is_ready
        return ReplicaStatistics(
            model=self.model,
            replica=self.index,
            state=self.state.value,
            reason=self.stuck or self.reason,
            progress=1.0 if ready else (life.progress if life else 0.0),
            pid=self.pid,
            sequences=self.sequences,
            slots=life.slots if life is not None and ready else self._source.slots,
            tokens=self._tokens_before + (life.tokens if life else 0),
            restarts=self.restarts,
            since=time.monotonic() - self.changed_at,
            device=self.device,
        )

    # --- what its owner asks of it --------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Keep ``sighting`` fresh until cancelled; ``on_change`` tells when it has changed."""
        await self._source.watch(self._tell)

    def _may_start(self) -> bool:
        return self.may_start(self)

    def _tell(self) -> None:
        before, self._unload_failed = self._unload_failed, self.unload_failed
        if self._unload_failed and not before:
            self.on_unload_failed(self)
        self._on_change(self)


def _always(_: Replica) -> bool:
    return True


def _ignore(_: Replica) -> None:
    pass
