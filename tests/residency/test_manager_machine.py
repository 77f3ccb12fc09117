"""The manager, the replicas' table and the ledger together, in virtual time and with whatever may happen in any order."""

import asyncio

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from slimproc.replicas.states import ReplicaEvent, ReplicaState
from slimproc.residency.views import HOST
from tests.residency.house import House, Settings
from tests.residency.virtual import run_virtual, until

GPU, GPU_1 = "GPU-0", "GPU-1"
TOTALS = {HOST: 100, GPU: 100, GPU_1: 60}
PLACES = st.sampled_from([(HOST,), (HOST,), (GPU,), (GPU, GPU_1), (GPU_1, HOST)])


@st.composite
def models(draw):
    return [
        Settings(
            name,
            bytes=draw(st.integers(5, 70)),
            pin=draw(st.integers(0, 6)) == 0,
            ttl=draw(st.sampled_from([None, None, 0.3, 2.0])),
            min_resident=draw(st.sampled_from([0.0, 0.0, 3.0])),
            replicas=draw(st.sampled_from([1, 1, 1, 3])),
            load_time=draw(st.sampled_from([0.0, 0.0, 0.2, 0.2, 2.0, 2.0, 100.0])),  # the last: more than it may take
            unload_time=draw(st.sampled_from([0.0, 0.2, 2.0])),
            load_error=draw(st.sampled_from(["", "", "", "", "no such file"])),
            devices=draw(PLACES),
            remote=draw(st.integers(0, 5)) == 0,
        )
        for name in "abcd"[: draw(st.integers(2, 4))]
    ]


NAMES = st.sampled_from("abcd")
SEEN = [
    ("unloaded", "not_resident"),
    ("loading", "not_resident"),
    ("unknown", "not_resident"),
    ("unknown", "resident"),
    ("failed", "unknown"),
    ("unknown", None),
]
"""What a server that is not ours may be found to be; of the last, that nobody has asked it yet."""
EVENTS = st.one_of(
    st.tuples(st.just("ask"), NAMES, st.sampled_from([0.0, 0.2, 4.0])),
    st.tuples(st.just("ask"), NAMES, st.sampled_from([0.0, 0.2, 4.0])),
    st.tuples(st.just("leave"), st.integers(0, 9)),
    st.tuples(st.just("load"), NAMES),
    st.tuples(st.just("unload"), NAMES),
    st.tuples(st.just("die"), st.integers(0, 9)),
    st.tuples(st.sampled_from([ReplicaEvent.STALLED, ReplicaEvent.CORRUPT]), st.integers(0, 9)),
    st.tuples(st.just("others"), st.sampled_from(sorted(TOTALS)), st.integers(0, 60)),
    st.tuples(st.just("fault"), st.sampled_from([GPU, GPU_1]), st.sampled_from(["", "lost"])),
    st.tuples(st.just("probing"), st.booleans()),
    st.tuples(st.just("see"), st.integers(0, 9), st.sampled_from(SEEN)),
    st.tuples(st.just("step")),
)
PAUSES = st.sampled_from([None, None, 0.0, 0.0, 0.01, 0.3, 1.0, 5.0])
"""None: what comes next happens in the same turn of the loop."""


def happen(house, event):
    what, *given = event
    names = sorted({unit.model for unit in house.units})
    alive = [life for life in house.lives if life.status is None]
    match what:
        case "ask":
            house.ask(names[ord(given[0]) % len(names)], given[1])
        case "leave" if house.waiting:
            house.leave(house.waiting[given[0] % len(house.waiting)])
        case "load" | "unload":
            getattr(house.manager, what)(names[ord(given[0]) % len(names)])
        case "die" if alive:
            alive[given[0] % len(alive)].die()
        case ReplicaEvent.STALLED | ReplicaEvent.CORRUPT if alive:
            life = alive[given[0] % len(alive)]
            if life.is_ready or what is ReplicaEvent.CORRUPT:  # steps are watched once there is work
                life.broken = True
                life._post(what, life, what.value)
        case "others":
            mine = sum(life.settings.bytes for life in alive if life.device == given[0])
            house.others[given[0]] = min(given[1], house.totals[given[0]] - mine)
        case "fault":
            house.faults[given[0]] = given[1]
            for life in alive:
                life.broken = life.broken or bool(life.device == given[0] and given[1])
        case "probing":
            house.probing = given[0]
        case "see":
            servers = [source for source in house.sources.values() if source.settings.remote]
            if servers:
                servers[given[0] % len(servers)].see(*given[1], asked=given[1][1] is not None)
        case "step":
            house.manager._step(asyncio.get_running_loop().time())


async def play(units, events, preload, strict):
    async with House(*units, totals=dict(TOTALS), strict=strict) as house:
        if preload:
            house.manager.preload([unit.name for unit in units])
        for event, pause in events:
            happen(house, event)
            if pause is not None:
                await asyncio.sleep(pause)
                house.check()
        # Nothing new happens: everybody is answered, and what nobody stopped is as it was.
        house.probing = True
        for source in house.sources.values():
            if source.settings.remote:
                source.see("unloaded", "not_resident")
        await asyncio.sleep(0.1)  # which is heard in a turn of its own
        await until(lambda: not house.waiting, f"everybody is answered: {house.waiting}", limit=900)
        await until(lambda: all(asked.outcomes for asked in house.requests), "what runs has ended", limit=900)
        house.check()
        states = {unit.replica.state for unit in house.units}
        assert not states & {ReplicaState.DRAINING} or any(unit.drained_for is None for unit in house.units)


@given(models(), st.lists(st.tuples(EVENTS, PAUSES), max_size=25), st.booleans(), st.booleans())
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_hold_has_an_owner_every_waiter_is_told_once_and_nobody_busy_is_stopped(units, events, preload, strict):
    run_virtual(play(units, events, preload, strict))
