"""ResidencyManager acts on what ``plan.py`` decides. It holds memory and no requests.

After everything that may matter (a sample, a replica's change, a queue's, an instant that was waited for) it looks at
the whole world and plans anew, so that no decision depends on what was decided before. All of it happens in the loop's
thread without an await; what takes time is the replicas' own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence

from slimproc import logs
from slimproc.errors import (
    DrainTimeout,
    NotReady,
    SlimprocError,
    UnloadFailed,
)
from slimproc.replicas.replica import Replica
from slimproc.replicas.states import ReplicaState
from slimproc.residency.learning import Learning
from slimproc.residency.ledger import Ledger
from slimproc.residency.losses import end_on_lost
from slimproc.residency.patience import Patience
from slimproc.residency.plan import explain, plan
from slimproc.residency.refusals import refusal
from slimproc.residency.restarts import RestartPermit, out_of_memory
from slimproc.residency.unit import Unit
from slimproc.residency.views import (
    Abandon,
    Action,
    Claim,
    Demand,
    Evict,
    Expire,
    Explanation,
    Load,
    Phase,
    Refuse,
    Sample,
    UnitView,
    World,
)
from slimproc.residency.wishes import Wishes

log = logs.get("slimproc.residency")


FailWaiting = Callable[[str, SlimprocError, "float | None"], None]
"""Fails those who wait for a model; with an instant, only those that came before it."""


class ResidencyManager:
    """One per server. ``run`` is its one task; everything else is called in the same thread and returns at once."""

    def __init__(
        self,
        units: Sequence[Unit],
        ledger: Ledger,
        *,
        demands: Callable[[], Iterable[Demand]],
        fail_waiting: FailWaiting,
        watch: Callable[[Sequence[int]], None],
        place: Callable[[Unit], tuple[str, ...]],
        keep: Callable[[Unit, Claim], None],
        on_eviction: Callable[[str], None],
        refresh: Callable[[str], None],
        obstacle: Callable[[Unit], str] = lambda _: "",
        strict: bool,
        drain_timeout: float,
        max_sample_age: float,
    ) -> None:
        """``watch`` tells the sampler whose processes are ours; ``place`` says where a unit may be; ``keep`` keeps what
        a model was seen to need; ``on_eviction`` counts; ``refresh`` has a device sampled at once, where that is cheap;
        ``obstacle`` says what is wrong with all devices of a unit, if something is.
        """
        self._units = {unit.name: unit for unit in units}
        self._ledger = ledger
        self._demands = demands
        self._fail_waiting = fail_waiting
        self._watch = watch
        self._place = place
        self._learning = Learning(ledger, keep)
        self._permit = RestartPermit(ledger)
        self._on_eviction = on_eviction
        self._sample_now = refresh
        self._obstacle = obstacle
        self._strict = strict
        self._drain_timeout = drain_timeout
        self._wishes = Wishes()
        self._patience = Patience(max_sample_age)
        self._latest: Sample | None = None
        self._demanded: set[str] = set()
        self._leaders: dict[str, int | None] = {}
        self._attentive = True
        """Somebody waits for something, so that every sample is a reason to plan."""
        self._closed = False
        self._woken = asyncio.Event()

    def __repr__(self) -> str:
        return f"<ResidencyManager {len(self._units)} units, {self._ledger!r}>"

    # --- another configuration ----------------------------------------------------------------------------------------

    def reconfigure(self, *, strict: bool, drain_timeout: float, max_sample_age: float) -> None:
        self._strict = strict
        self._drain_timeout = drain_timeout
        self._patience.set_limit(max_sample_age)
        self.wake()

    def add(self, unit: Unit) -> None:
        unit.devices = self._place(unit)
        self._units[unit.name] = unit
        self.wake()

    def retire(self, name: str) -> None:
        """It is being stopped for good, so that nobody's wishes are for it; ``remove`` it when it has stopped."""
        unit = self._units.get(name)
        if unit is not None:
            self._wishes.drop(unit.model)
            unit.retire()
            self.wake()

    def remove(self, name: str) -> None:
        """It has stopped, and what it held is free."""
        unit = self._units.pop(name, None)
        if unit is not None:
            self._release(unit, time.monotonic())
            self._ledger.forget(name, time.monotonic())
            self._leaders.pop(name, None)
            self._learning.forget(name)
            self._permit.forget(name)
            self.wake()

    # --- news ---------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Something may have changed: plan again, in a turn of its own."""
        self._attentive = True
        self._woken.set()

    def on_sample(self, sample: Sample) -> None:
        self._ledger.observe(sample)
        self._latest = sample
        end_on_lost(self._units.values(), sample)
        for unit in self._units.values():
            devices = self._place(unit)
            if devices != unit.devices:
                unit.devices = devices
                if unit.device is None:
                    unit.renew_claim()  # it needs other bytes on a GPU than on the host
                self._attentive = True
        if self._attentive:
            self._woken.set()

    def on_replica_change(self, replica: Replica) -> None:
        """A replica's state changed, one of its slots became free, or its server was heard of."""
        unit = self._units.get(replica.name)
        if unit is None:
            return
        before, unit.state = unit.state, replica.state
        if before is not replica.state:
            self._on_state(unit, before, time.monotonic())
            self.wake()
        elif self._attentive or unit.config.ttl is not None or replica.sighting is not None:
            self.wake()

    def _on_state(self, unit: Unit, before: ReplicaState, now: float) -> None:
        down = unit.state in (ReplicaState.STOPPED, ReplicaState.FAILED)
        if down and unit.asked == "start":
            return  # by a stop from before; the start, for which there is a hold, is yet to be heard
        unit.asked = ""
        if unit.state is not ReplicaState.BACKOFF:
            self._permit.forget(unit.name)
        match unit.state:
            case ReplicaState.STARTING:
                unit.forgiven = False
            case ReplicaState.READY if before is ReplicaState.DRAINING:
                self._drain_given_up(unit)
            case ReplicaState.READY:
                self._ledger.resident(unit.name, now)
            case ReplicaState.BACKOFF:
                self._ledger.lost(unit.name, now, took_all=unit.replica.ended_by_oom)
                self._refresh(unit)
                if self._latest is not None:
                    end_on_lost([unit], self._latest)
                if out_of_memory(unit.replica):
                    self._refuse_for_memory(unit)
            case ReplicaState.STOPPED | ReplicaState.FAILED:
                if unit.drained_for is not None and not unit.replica.remains:
                    self._on_eviction(unit.model)
                unit.drained_for, unit.expired = None, False
                self._release(unit, now)

    def _release(self, unit: Unit, now: float) -> None:
        if unit.device is not None and not unit.replica.remains:  # else somebody else's process keeps its hold
            self._learning.learn(unit, now)
            self._ledger.end(unit.name, now)
            self._refresh(unit)
            unit.device = None

    def _refresh(self, unit: Unit) -> None:
        if unit.device is not None:
            self._sample_now(unit.device)

    def _refuse_for_memory(self, unit: Unit) -> None:
        """By the numbers it fits, and yet it could not get its memory, also not from a second try."""
        seen = self.explain(unit.model)
        reason = f"{unit.model} did not get the memory that it needs on {unit.device}: {unit.replica.reason}"
        log.warning("a model is refused", model=unit.model, code="insufficient_memory", reason=reason)
        self._wishes.drop(unit.model)
        told = dataclasses.replace(seen, verdict="refuse", reason=reason)
        self._fail_waiting(unit.model, refusal("insufficient_memory", told), None)

    def _drain_given_up(self, unit: Unit) -> None:
        """DRAINING went back to READY: we abandoned it, or its limit passed, and then who waited for it is told."""
        waiting, unit.drained_for, unit.expired = unit.drained_for, None, False
        if waiting is not None and unit.replica.drain_timed_out:
            log.warning("an eviction is given up: its victim stays busy", replica=unit.name, waiting=waiting)
            error = DrainTimeout(f"{unit.model} was to make room for {waiting} and stayed busy too long")
            self._fail_waiting(waiting, error, unit.drain_began)

    def on_unload_failed(self, replica: Replica) -> None:
        """A server that is not ours would not let go of its model. It keeps its hold, and is asked on."""
        unit = self._units.get(replica.name)
        if unit is not None and unit.drained_for is not None:
            error = UnloadFailed(f"{unit.model} could not be unloaded: {replica.unload_failed}")
            self._fail_waiting(unit.drained_for, error, None)
        self.wake()

    def may_start(self, replica: Replica) -> bool:
        """May a replica that backed off start again?"""
        return not self._closed and self._permit.given(replica, time.monotonic())

    # --- wishes -------------------------------------------------------------------------------------------------------

    def preload(self, models: Iterable[str]) -> None:
        """Load these at the start, in this order, as far as they fit without evicting anybody."""
        self._wishes.preload(models)
        self.wake()

    def load(self, model: str) -> None:
        """An operator wants it: as if a request had come, and earlier failures do not count."""
        for unit in self._of(model):
            unit.forgiven = unit.state is ReplicaState.FAILED
            unit.replica.forgive()
        self._wishes.load(model, time.monotonic())
        self.wake()

    def unload(self, model: str) -> None:
        """An operator wants it out: it drains, and what is not done within ``drain_timeout`` is ended."""
        self._wishes.drop(model)
        for unit in self._of(model):
            unit.unload(self._drain_timeout)
        self.wake()

    def wanted(self, model: str) -> bool:
        """It is to be loaded for the start or an operator, and has not been yet."""
        return model in self._wishes

    def close(self) -> None:
        """Load and unload nothing more: the server shuts down, and stops the replicas itself."""
        self._closed = True
        for unit in self._units.values():
            self._learning.learn(unit, time.monotonic())

    # --- looking ------------------------------------------------------------------------------------------------------

    def _of(self, model: str) -> list[Unit]:
        return [unit for unit in self._units.values() if unit.model == model]

    def units(self, model: str) -> list[UnitView]:
        """The units of a model as planning sees them; none for a model that costs no memory of ours to know about."""
        return [self._view(unit) for unit in self._of(model)]

    def explain(self, model: str) -> Explanation:
        """What would happen, or does, if somebody asked for ``model`` now."""
        return explain(self._world(time.monotonic(), self._all_demands()), model)

    def _world(self, now: float, demands: Sequence[Demand]) -> World:
        return World(
            now=now,
            devices=self._ledger.views(now),
            units=[self._view(unit) for unit in self._units.values()],
            demands=demands,
            strict=self._strict,
        )

    def _view(self, unit: Unit) -> UnitView:
        return unit.view(self._ledger.held(unit.name), self._ledger.attributed(unit.name))

    def _all_demands(self) -> list[Demand]:
        return self._wishes.beside(list(self._demands()))

    # --- the task -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Plan and act until closed or cancelled."""
        while not self._closed:
            self._woken.clear()
            wake_at = self._step(time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if wake_at is None else max(0.0, wake_at - time.monotonic())):
                    await self._woken.wait()

    def _step(self, now: float) -> float | None:
        """One look and what follows from it. Returns the instant of the next one, should nothing happen before."""
        self._attach()
        self._adopt(now)
        self._learning.look(self._units.values(), now)
        demands = self._all_demands()
        self._renew_claims(demands)
        world = self._world(now, demands)
        decided = plan(world)
        for action in decided.actions:
            self._act(action, now)
        self._wishes.settle(decided, world)
        over, patience_ends = self._patience.look(decided, world)
        for demand in over:
            self._fail_waiting(demand.model, NotReady(self._why_unmeasured(demand.model), retry_after=5.0), None)
        draining = any(unit.drained_for is not None for unit in self._units.values())
        waited_for = any(explanation.verdict != "resident" for explanation in decided.explanations.values())
        self._attentive = draining or waited_for
        return min((at for at in (decided.wake_at, patience_ends) if at is not None), default=None)

    def _why_unmeasured(self, model: str) -> str:
        known = next(filter(None, map(self._obstacle, self._of(model))), "")
        because = f": {known}" if known else ""
        return f"there is no fresh sample of the memory that {model} needs{because}"

    def _attach(self) -> None:
        """Tell ledger and sampler whose processes the holds are for."""
        leaders = {unit.name: unit.replica.pid for unit in self._units.values() if unit.device is not None}
        if leaders == self._leaders:
            return
        for name, leader in leaders.items():
            self._ledger.attach(name, leader)
        self._leaders = leaders
        self._watch([leader for leader in leaders.values() if leader is not None])

    def _adopt(self, now: float) -> None:
        """A server that has its model in memory already is held and served as it is: nothing is loaded twice. One
        that has let go by itself holds nothing any more.
        """
        for unit in self._units.values():
            if unit.retired:
                continue
            if unit.phase is Phase.UNKNOWN and unit.replica.resident_already and unit.devices:
                self._start(unit, unit.device or unit.devices[0], unit.claim.peak, now)
            elif unit.phase in (Phase.ABSENT, Phase.FAILED):
                self._release(unit, now)

    def _renew_claims(self, demands: Sequence[Demand]) -> None:
        """Of models that somebody has begun to want: their files may have come or changed, or were measured."""
        models = {demand.model for demand in demands}
        for unit in self._units.values():
            if unit.model in models - self._demanded and unit.device is None:
                unit.renew_claim()
            if unit.phase is Phase.LOADING:
                unit.unwanted = unit.model not in models  # any more
        self._demanded = models

    # --- acting -------------------------------------------------------------------------------------------------------

    def _act(self, action: Action, now: float) -> None:
        match action:
            case Load(unit=name, device=device, hold=hold):
                self._start(self._units[name], device, hold, now)
            case Evict(unit=name, by=model):
                log.info("a model makes room", replica=name, waiting=model, device=self._units[name].device)
                self._units[name].evict(model, self._drain_timeout, now)
            case Expire(unit=name):
                log.info("a model was idle for its ttl", replica=name, ttl=self._units[name].config.ttl)
                self._units[name].expire(self._drain_timeout)
            case Abandon(unit=name):
                self._units[name].abandon_drain()
            case Refuse():
                self._refuse(action)

    def _start(self, unit: Unit, device: str, hold: int, now: float) -> None:
        if unit.device is None:
            self._ledger.hold(unit.name, device, unit.claim, now, hold)
            unit.device = device
        else:
            self._ledger.load_again(unit.name, now)  # its server did not say that it let go
        log.info("a model is to be loaded", replica=unit.name, device=unit.device, hold=hold)
        unit.start()

    def _refuse(self, wanted: Refuse) -> None:
        explanation = wanted.explanation
        log.warning("a model is refused", model=wanted.model, code=wanted.code, reason=explanation.reason)
        self._wishes.drop(wanted.model)
        self._fail_waiting(wanted.model, refusal(wanted.code, explanation), None)
