"""The ledger and planning together, on a simulated machine: whatever happens, the rules hold and everybody is answered."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
from hypothesis import HealthCheck, assume, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from slimproc.residency.plan import plan
from slimproc.residency.views import HOST, Claim, Load, Phase
from tests.residency.world import GPU, GPU_1, Request, SimMachine, SimUnit

TOTALS = {HOST: 120, GPU: 100, GPU_1: 60}
PLACES = st.sampled_from([(HOST,), (GPU,), (GPU_1,), (GPU, GPU_1), (GPU_1, GPU), (GPU, HOST)])
PATIENCE = 60.0
"""Virtual seconds in which a demand is served or refused for each one before it, once requests only end."""


@st.composite
def claims(draw, source=None) -> tuple[Claim, int]:
    """A claim, and what is really used: no more than that."""
    source = source or draw(st.sampled_from(["measured", "configured", "estimated"]))
    run = draw(st.integers(2, 60))
    load = run if source == "estimated" else draw(st.integers(max(1, run - 10), run + 20))
    file = draw(st.sampled_from([None, None, "weights"]))
    used = draw(st.integers(1, min(run, load)))
    return Claim(load, run, 0, file, 20 if file else 0, source), used


@st.composite
def sim_units(draw, at_most=5) -> list[SimUnit]:
    units = []
    for number in range(draw(st.integers(2, at_most))):
        needs, uses = draw(claims())
        remote = draw(st.integers(0, 4)) == 0
        if remote:
            needs = Claim(needs.peak, needs.peak, draw(st.integers(0, 3)), source="configured")
        devices = draw(PLACES)
        units += [
            SimUnit(
                name=f"m{number}-{copy}",
                model=f"m{number}",
                claim=needs,
                devices=devices,
                uses=uses,
                remote=remote,
                load_time=draw(st.sampled_from([0.25, 1.0, 3.0])),
                unload_time=draw(st.sampled_from([0.25, 1.0])),
                pinned=draw(st.integers(0, 6)) == 0,
                ttl=draw(st.sampled_from([None, None, 0.5, 4.0])),
                min_resident=draw(st.sampled_from([0.0, 0.0, 3.0])),
                slots=draw(st.sampled_from([1, 2])),
            )
            for copy in range(draw(st.sampled_from([1, 1, 2])))
        ]
    return units


class Residency(RuleBasedStateMachine):
    """Requests come, leave and end, processes die, others take memory, and the probe goes silent, in any order."""

    @initialize(units=sim_units(), strict=st.booleans(), preload=st.booleans())
    def start(self, units, strict, preload):
        self.machine = SimMachine(TOTALS, units, strict=strict)
        self.models = sorted({each.model for each in units})
        self.machine.preloads = list(self.models) if preload else []

    @rule(ticks=st.integers(1, 8))
    def time_passes(self, ticks):
        for _ in range(ticks):
            self.machine.step()
            self.check_order()
            self.machine.check()

    @rule(which=st.integers(0, 9), takes=st.sampled_from([0.25, 1.0, 6.0]))
    def somebody_asks(self, which, takes):
        self.machine.ask(self.models[which % len(self.models)], takes)
        self.machine.replan()
        self.check_order()

    @rule(which=st.integers(0, 9))
    def somebody_leaves(self, which):
        if self.machine.waiting:
            self.machine.leave(self.machine.waiting[which % len(self.machine.waiting)])
            self.machine.replan()

    @rule(which=st.integers(0, 9))
    def a_process_dies(self, which):
        alive = [each for each in self.machine.units.values() if each.pid and not each.remote]
        if alive:
            self.machine.crash(alive[which % len(alive)])
            self.machine.replan()

    @rule(where=st.sampled_from(sorted(TOTALS)), count=st.integers(-60, 60))
    def others_take_or_return_memory(self, where, count):
        self.machine.grow_outside(where, count)
        self.machine.replan()

    @rule(linger=st.sampled_from([0.0, 0.5, 1.5]))
    def devices_give_memory_back_late(self, linger):
        self.machine.linger = linger

    @rule()
    def the_probe_falls_silent_or_speaks_again(self):
        self.machine.probing = not self.machine.probing
        self.machine.probe()
        self.machine.replan()

    @rule(where=st.sampled_from(sorted(TOTALS)))
    def planning_again_at_once_changes_nothing(self, where):
        """What was decided is in the world then, so that nobody is asked twice."""
        self.machine.replan()
        again = plan(self.machine.world())
        assert again.actions == [], f"{again.actions} after it had been acted on"

    @invariant()
    def the_rules_hold(self):
        if hasattr(self, "machine"):
            self.machine.check()

    def check_order(self):
        """The older demands are told the same when the younger ones are not there."""
        world = self.machine.world()
        everybody = plan(world).explanations
        requests = sorted((each for each in world.demands if not each.preload), key=lambda each: each.since)
        for count in range(1, len(requests)):
            alone = plan(dataclasses.replace(world, demands=requests[:count])).explanations
            for model, explanation in alone.items():
                assert everybody[model] == explanation, f"{explanation} but with others {everybody[model]}"

    def teardown(self):
        """Once nothing new happens, everybody who waits is answered within a bounded time."""
        if not hasattr(self, "machine"):
            return
        machine = self.machine
        machine.probing = True
        left = PATIENCE * (len(machine.waiting) + 1)
        while machine.waiting and left > 0:
            machine.step()
            machine.check()
            left -= 0.25
        told = machine.last_plan.explanations if machine.last_plan else {}
        assert not machine.waiting, f"nobody answers {[(each.model, told.get(each.model)) for each in machine.waiting]}"
        for _ in range(80):
            machine.step()
            machine.check()
        held = {each.owner for each in machine.ledger.holds() if each.state != "residue"}
        there = {each.name for each in machine.units.values() if each.phase is not Phase.ABSENT}
        assert held == there, "a hold was left behind"


TestResidency = Residency.TestCase
TestResidency.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


@st.composite
def crowded(draw) -> tuple[SimMachine, list[str]]:
    """A machine on which several models are busy, and others are asked for. Nothing on it frees bytes unforeseen."""
    units = []
    for number in range(draw(st.integers(3, 8))):
        needs = Claim(size := draw(st.integers(5, 60)), size, source="measured")
        units.append(
            SimUnit(
                f"m{number}",
                f"m{number}",
                needs,
                draw(st.sampled_from([(GPU,), (GPU,), (GPU_1,)])),
                uses=draw(st.integers(1, size)),
                load_time=draw(st.sampled_from([0.25, 1.0, 3.0])),
                unload_time=draw(st.sampled_from([0.25, 1.0])),
            )
        )
    machine = SimMachine(TOTALS, units)
    names = [each.name for each in units]
    there = draw(st.integers(1, len(names) - 2))
    for name in names[:there]:
        machine.ask(name, draw(st.sampled_from([0.25, 8.0, 20.0])))
        for _ in range(14):
            machine.step()
    assume(not machine.waiting)
    absent = [each.name for each in units if each.phase is Phase.ABSENT]
    assume(len(absent) >= 2)
    return machine, draw(st.lists(st.sampled_from(absent), min_size=2, max_size=5, unique=True))


@given(crowded())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_nobody_is_served_later_because_somebody_younger_waits(case):
    """The same machine is run with all who wait, and with only the older ones of them."""
    machine, asked = case
    for model in asked:
        machine.ask(model, takes=30.0)  # longer than anybody older is busy: who is let past is in the way

    def run(count: int) -> list[Request]:
        alone = machine.copy(set(range(count)))
        requests = sorted(alone.waiting, key=lambda each: each.since)
        for _ in range(4 * int(PATIENCE) * len(asked)):
            if not alone.waiting:
                break
            alone.step()
            alone.check()
        assert not alone.waiting
        return requests

    everybody = run(len(asked))
    for count in range(1, len(asked)):
        for request, crowded in zip(run(count), everybody, strict=False):
            assert crowded.outcome == request.outcome
            assert crowded.at <= request.at, f"{request.model} was delayed"


def test_alternating_demands_for_two_models_that_do_not_fit_together_lose_nobody_and_leave_no_hold_behind():
    """A hundred rounds with bytes that come back late and a ttl in play."""
    units = [
        SimUnit(name, name, Claim(60, 60, source="measured"), (GPU,), uses=60, ttl=0.5 if name == "b" else None)
        for name in ("a", "b")
    ]
    machine = SimMachine({GPU: 100}, units)
    machine.linger = 0.5
    requests = []
    for turn in range(200):
        requests.append(machine.ask("ab"[turn % 2], takes=0.25 * (turn % 3)))
        for _ in range(turn % 7):
            machine.step()
            machine.check()
    for _ in range(4 * 1000):
        machine.step()
        machine.check()
    assert {each.outcome for each in requests} == {"served"}
    loaded = {each.name for each in units if each.phase is Phase.RESIDENT}
    assert {each.owner for each in machine.ledger.holds()} == loaded
    assert not any(isinstance(each, Load) for each in machine.replan().actions)
