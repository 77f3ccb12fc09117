"""What to load and what to unload next: a pure function of the world. Planning again from scratch is always right.

Demands are served oldest first, those of requests before those of the start. Each takes from the room what it needs:
bytes that are there, or those of victims that will have gone. While an older demand waits for memory on a device, nobody
younger is loaded there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from slimproc.residency.draft import Draft
from slimproc.residency.placing import load_more, place
from slimproc.residency.reasons import names
from slimproc.residency.views import Abandon, Demand, Expire, Explanation, Phase, Plan, UnitView, World


def plan(world: World) -> Plan:
    """The next actions, why, and when to look again. Deterministic; never raises on any world."""
    return _Planner(world).plan()


def explain(world: World, model: str) -> Explanation:
    """What happens, or would happen, to a request for ``model`` that came now."""
    if not any(demand.model == model and not demand.preload for demand in world.demands):
        others = [demand for demand in world.demands if demand.model != model]
        newest = max((demand.since for demand in others if not demand.preload), default=world.now)
        asked = Demand(model, since=max(world.now, newest))
        world = dataclasses.replace(world, demands=[*others, asked])
    return plan(world).explanations[model]


class _Planner:
    def __init__(self, world: World) -> None:
        self._world = world
        self._draft = Draft(world)
        self._units: dict[str, list[UnitView]] = {}
        for unit in world.units:
            self._units.setdefault(unit.model, []).append(unit)
        # An equal instant is decided by the model's name, so that the same world has the same plan.
        ordered = sorted(_merged(world.demands), key=lambda each: (each.preload, each.since, each.model))
        strict = world.strict and bool(ordered) and not ordered[0].preload
        self._demands = ordered[:1] if strict else ordered
        self._passed_over = ordered[len(self._demands) :]
        self._wanted = {demand.model for demand in self._demands}
        self._explanations: dict[str, Explanation] = {}

    def plan(self) -> Plan:
        draft = self._draft
        draft.room.release(unit for unit in self._world.units if self._leaves(unit))
        for demand in self._demands:
            served = self._explanations[demand.model] = self._serve(demand)
            if not demand.preload:
                draft.older.add(demand.model)
                if served.verdict in ("wait", "evict"):
                    units = self._units.get(demand.model, ())
                    draft.wait_for(demand.model, [device for unit in units for device in unit.devices])
        for demand in self._demands:
            if self._explanations[demand.model].verdict in ("resident", "loading", "load"):
                load_more(draft, self._units.get(demand.model, ()))
        for demand in self._passed_over:
            self._explanations[demand.model] = self._pass_over(demand)
        self._abandon_needless()
        self._expire()
        return Plan(draft.actions, self._explanations, self._wake_at())

    def _leaves(self, unit: UnitView) -> bool:
        """It is on its way out, whatever is decided here."""
        if unit.phase is Phase.DRAINING:
            return unit.drained_for is None and not (unit.expired and unit.model in self._wanted)
        return unit.phase is Phase.LEAVING and not unit.note

    # --- one demand ---------------------------------------------------------------------------------------------------

    def _serve(self, demand: Demand) -> Explanation:
        draft, model = self._draft, demand.model
        units = [unit for unit in self._units.get(model, ()) if unit.name not in draft.taken]
        there = next((unit for unit in units if unit.phase is Phase.RESIDENT), None)
        if there is not None:
            return draft.reasons.held(there, "resident", f"{model} is in memory")
        draining = next((unit for unit in units if unit.phase is Phase.DRAINING and not self._leaves(unit)), None)
        if draining is not None:
            draft.taken.add(draining.name)
            draft.actions.append(Abandon(draining.name))
            return draft.reasons.held(draining, "resident", f"{model} is in memory, and is drained no longer")
        loading = [unit for unit in units if unit.phase is Phase.LOADING]
        down = [unit for phase in (Phase.ABSENT, Phase.UNKNOWN) for unit in units if unit.phase is phase]
        loadable = [unit for unit in down if not unit.failed]
        # On a unit that backs off nobody counts, unless there is no other.
        counted = [unit for unit in loading if not unit.backing_off] or ([] if loadable else loading)
        if counted:
            what = "is to be started again" if counted[0].backing_off else "is being loaded"
            return draft.reasons.held(counted[0], "loading", f"{model} {what}{_because(counted[0])}")
        if loadable:
            return place(draft, demand, loadable)
        return self._await_end(demand)

    def _await_end(self, demand: Demand) -> Explanation:
        """All its units are on their way out, or have failed."""
        draft, model = self._draft, demand.model
        ours = self._units.get(model, ())
        units = [unit for unit in ours if unit.phase is not Phase.FAILED and not unit.failed]
        if not units:
            failed = next((_because(unit) for unit in ours if unit.note), "")
            return draft.reasons.plain(model, "refuse", f"{model} has failed{failed}")
        going = next((unit for unit in units if not (unit.phase is Phase.LEAVING and unit.note)), None)
        if going is None:
            reason = f"{names(units)} could not be unloaded{_because(units[0])}"
            explanation = draft.reasons.held(units[0], "wait" if demand.preload else "refuse", reason)
            return explanation if demand.preload else draft.refuse("lifecycle_pending", explanation)
        if going.device is not None and going.device in draft.room.devices and not demand.preload:
            draft.room.reserve(dataclasses.replace(going, hold=0), going.device)
        return draft.reasons.held(going, "wait", f"{model} is being unloaded, and can be loaded again after that")

    def _pass_over(self, demand: Demand) -> Explanation:
        for unit in self._units.get(demand.model, ()):
            if unit.phase is Phase.RESIDENT and unit.name not in self._draft.taken:
                return self._draft.reasons.held(unit, "resident", f"{demand.model} is in memory")
        reason = f"{demand.model} has its turn after {self._demands[0].model}, which was asked for before it"
        return self._draft.reasons.plain(demand.model, "wait", reason)

    # --- everybody else -----------------------------------------------------------------------------------------------

    def _abandon_needless(self) -> None:
        for unit in self._world.units:
            evicted = unit.phase is Phase.DRAINING and unit.drained_for is not None
            if evicted and unit.name not in self._draft.taken:
                self._draft.actions.append(Abandon(unit.name))

    def _expiring(self) -> Iterator[tuple[UnitView, float]]:
        """Units that nobody wants, and when their ``ttl`` ends."""
        demanded = {demand.model for demand in self._world.demands}
        for unit in self._world.units:
            idle = unit.phase is Phase.RESIDENT and not unit.busy and not unit.pinned
            if idle and unit.ttl is not None and unit.model not in demanded and unit.name not in self._draft.taken:
                yield unit, unit.idle_since + unit.ttl

    def _expire(self) -> None:
        self._draft.actions += [Expire(unit.name) for unit, ends in self._expiring() if ends <= self._world.now]

    def _wake_at(self) -> float | None:
        instants = [ends for _, ends in self._expiring()]
        if any(explanation.verdict == "wait" for explanation in self._explanations.values()):
            instants += [
                unit.resident_since + unit.min_resident for unit in self._world.units if unit.phase is Phase.RESIDENT
            ]
        return min((instant for instant in instants if instant > self._world.now), default=None)


def _merged(demands: Sequence[Demand]) -> Iterator[Demand]:
    """One demand per model: a request's before that of the start, the oldest before others."""
    best: dict[str, Demand] = {}
    for demand in demands:
        known = best.get(demand.model)
        if known is None or (demand.preload, demand.since) < (known.preload, known.since):
            best[demand.model] = demand
    yield from best.values()


def _because(unit: UnitView) -> str:
    return f": {unit.note}" if unit.note else ""
