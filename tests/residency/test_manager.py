"""The manager with real replicas and a ledger, over played engines and in virtual time."""

import asyncio
import functools
import time

import pytest

from slimproc.errors import DrainTimeout, InsufficientMemory, NotReady
from slimproc.replicas.states import ReplicaState
from slimproc.residency.views import HOST, Phase
from tests.residency.house import House, Settings
from tests.residency.virtual import run_virtual, until

READY, STOPPED, DRAINING = ReplicaState.READY, ReplicaState.STOPPED, ReplicaState.DRAINING
STARTING, BACKOFF = ReplicaState.STARTING, ReplicaState.BACKOFF
GPU = "GPU-0"


def virtual(test):
    @functools.wraps(test)
    def run(*args, **kwargs):
        run_virtual(test(*args, **kwargs))

    return run


@virtual
async def test_who_is_asked_for_takes_the_place_of_who_is_idle_and_that_is_one_eviction():
    async with House(Settings("a"), Settings("b")) as house:
        for model in "abab":
            asked = house.ask(model)
            await house.until_answered(asked)
            assert asked.outcomes == ["served"]
            house.check()
        assert house.evicted == ["a", "b", "a"]


@virtual
async def test_a_drain_that_is_given_up_since_nobody_waits_any_more_is_no_eviction():
    async with House(Settings("a"), Settings("b")) as house:
        await house.until_answered(house.ask("a"))
        long = house.ask("a", takes=20)
        waiting = house.ask("b")
        await house.until_state("a", DRAINING)
        house.leave(waiting)
        await house.until_state("a", READY)
        await house.until_answered(long)
        assert long.outcomes == ["served"]
        assert house.evicted == []


@virtual
async def test_a_victim_that_stays_busy_serves_on_and_only_those_who_came_before_its_drain_are_told():
    async with House(Settings("a"), Settings("b"), drain_timeout=5) as house:
        await house.until_answered(house.ask("a"))
        long = house.ask("a", takes=7)
        early = house.ask("b")
        await house.until_state("a", DRAINING)
        late = house.ask("b")
        await house.until_answered(early, late, long)
        assert isinstance(early.outcomes[0], DrainTimeout)
        assert late.outcomes == long.outcomes == ["served"]


@virtual
async def test_an_operators_unload_right_after_the_decision_to_load_keeps_the_hold_until_the_process_is_gone():
    async with House(Settings("a")) as house:
        await until(lambda: house.ledger.views(time.monotonic()), "there is a sample")
        house.manager.load("a")
        house.manager._step(time.monotonic())  # in the same turn, before the replica has heard of it
        house.manager.unload("a")
        house.manager._step(time.monotonic())
        house.check()
        assert house.ledger.held("a/0") == 60
        await until(lambda: house.lives and house.lives[0].status, "the load that nobody wants has ended")
        await house.until_state("a", STOPPED)
        assert house.ledger.held("a/0") == 0


@virtual
async def test_a_load_that_is_asked_right_after_an_unload_of_a_failed_model_has_its_hold():
    async with House(Settings("a", load_error="no such file")) as house:
        house.manager.load("a")
        await house.until_state("a", ReplicaState.FAILED, limit=900)
        house.of("a")[0].config.load_error = ""
        house.manager.unload("a")
        house.manager.load("a")
        house.manager._step(time.monotonic())
        await house.until_state("a", READY)
        house.check()
        assert house.ledger.held("a/0") == 60


@virtual
async def test_an_operators_wish_ends_when_its_model_has_failed():
    async with House(Settings("a", load_error="no such file")) as house:
        house.manager.load("a")
        await house.until_state("a", ReplicaState.FAILED, limit=900)
        await until(lambda: not house.manager.wanted("a"), "the wish is over")


@virtual
async def test_unloading_what_is_not_there_changes_nothing_for_the_next_request():
    async with House(Settings("a")) as house:
        house.manager.unload("a")
        house.manager.unload("a")
        asked = house.ask("a")
        await house.until_answered(asked)
        assert asked.outcomes == ["served"]


@pytest.mark.parametrize("moment", ["asked", "starting", "ready", "draining", "stopping", "backoff"])
@virtual
async def test_a_request_that_waits_survives_an_operators_unload_at_any_moment(moment):
    async with House(Settings("a", load_time=2, unload_time=2)) as house:
        if moment in ("ready", "draining", "stopping", "backoff"):
            await house.until_answered(house.ask("a"))
        if moment == "draining":
            house.ask("a", takes=3)
            house.manager.unload("a")
            await house.until_state("a", DRAINING)
        if moment == "stopping":
            house.manager.unload("a")
            await house.until_state("a", ReplicaState.STOPPING)
        if moment == "backoff":
            for _ in range(2):  # the first restart is at once
                await house.until_state("a", READY)
                house.life("a").die()
                await until(lambda: house.state("a") is not READY, "its death is noticed")
            await house.until_state("a", ReplicaState.BACKOFF)
        if moment == "starting":
            house.ask("a")
            await house.until_state("a", ReplicaState.STARTING)
        asked = house.ask("a")
        house.manager.unload("a")
        await house.until_answered(asked)
        assert asked.outcomes == ["served"]


@virtual
async def test_a_model_is_unloaded_its_ttl_after_its_last_request_and_two_hundred_requests_at_that_edge_are_served():
    async with House(Settings("a", ttl=1.0, unload_time=0.2, load_time=0.1)) as house:
        for number in range(200):
            asked = house.ask("a")
            await house.until_answered(asked)
            assert asked.outcomes == ["served"]
            ends = time.monotonic() + 0.7 + 0.003 * number
            await until(lambda ends=ends: time.monotonic() >= ends, "the edge is near")
            house.check()
        loads = len(house.lives)
        await house.until_state("a", STOPPED)
        assert 1 < loads < 200
        assert house.evicted == []


@virtual
async def test_a_device_without_fresh_samples_is_waited_for_only_so_long_and_works_again_after():
    async with House(Settings("a"), Settings("b", bytes=20)) as house:
        await house.until_answered(house.ask("a"))
        house.probing = False
        later = time.monotonic() + 6
        await until(lambda: time.monotonic() > later, "the sample is old")
        refused = house.ask("b")
        await house.until_answered(refused, house.ask("a"))
        assert isinstance(refused.outcomes[0], NotReady)
        house.probing = True
        served = house.ask("b")
        await house.until_answered(served)
        assert served.outcomes == ["served"]


@virtual
async def test_a_restart_for_which_others_took_the_memory_is_given_up_after_a_while_and_its_hold_with_it():
    async with House(Settings("a")) as house:
        await house.until_answered(house.ask("a"))
        house.others[HOST] = 90
        house.life("a").die()
        await house.until_state("a", ReplicaState.BACKOFF)
        await house.until_state("a", STOPPED)
        assert house.ledger.held("a/0") == 0
        refused = house.ask("a")
        await house.until_answered(refused)
        assert isinstance(refused.outcomes[0], InsufficientMemory)
        house.others[HOST] = 0
        await until(lambda: house.ledger.views(time.monotonic())[HOST].available == 100, "a sample shows it")
        served = house.ask("a")
        await house.until_answered(served)
        assert served.outcomes == ["served"]


@virtual
async def test_on_a_lost_gpu_nothing_is_restarted_and_its_model_moves_to_another():
    totals = {HOST: 100, GPU: 100, "GPU-1": 100}
    async with House(Settings("a", devices=(GPU, "GPU-1")), totals=totals) as house:
        await house.until_answered(house.ask("a"))
        house.faults[GPU] = "lost"
        house.life("a").die()
        await until(lambda: house.state("a") is not READY, "its death is noticed")
        asked = house.ask("a")
        await house.until_answered(asked)
        assert asked.outcomes == ["served"]
        assert house.of("a")[0].device == "GPU-1"


@virtual
@pytest.mark.parametrize("gone", [False, True], ids=["lost", "not listed"])
@pytest.mark.parametrize("state", ["loading", "idle", "busy", "draining", "backing off"])
async def test_whoever_is_on_a_gpu_that_is_lost_is_killed_at_once_and_moves_to_another(state, gone):
    totals = {HOST: 100, GPU: 100, "GPU-1": 100}
    async with House(Settings("a", devices=(GPU, "GPU-1")), Settings("b"), totals=totals) as house:
        bystander = house.ask("b")
        await house.until_answered(bystander)
        busy = house.ask("a", takes=0.1 if state == "loading" else 1000.0)
        if state == "loading":
            await until(lambda: house.state("a") is STARTING, "it loads")
        else:
            await house.until_state("a", READY)
        if state in ("idle", "backing off"):
            house.life("a").taken.clear()
        if state == "draining":
            house.manager.unload("a")
            await house.until_state("a", DRAINING)
        if state == "backing off":
            house.life("a").die()
            await house.until_state("a", BACKOFF)
        first = house.of("a")[0].replica.life
        if gone:
            del house.totals[GPU]
        else:
            house.faults[GPU] = "lost"
        if first is not None:
            await until(lambda: first.status is not None, "it is ended", limit=1.0 if state != "draining" else 60.0)
        asked = house.ask("a")
        await house.until_answered(asked, limit=10.0)
        assert asked.outcomes == ["served"]
        assert house.of("a")[0].device == "GPU-1"
        if state in ("busy", "draining"):
            assert busy.outcomes != ["served"]
            assert len(busy.outcomes) == 1
            house.cut_off.clear()
        assert house.metrics.engine_restarts["device_lost"] == (state in ("loading", "idle", "busy"))
        assert house.life("b").status is None, "who is elsewhere notices nothing"


@virtual
@pytest.mark.parametrize("fault", ["driver_mismatch", "unknown: the memory probe does not answer"])
async def test_what_is_in_memory_serves_on_while_nobody_knows_how_its_gpu_is(fault):
    async with House(Settings("a", devices=(GPU,)), totals={HOST: 100, GPU: 100}) as house:
        await house.until_answered(house.ask("a"))
        first = house.life("a")
        house.faults[GPU] = fault
        await asyncio.sleep(30.0)
        await house.until_answered(house.ask("a"))
        assert house.life("a") is first


@virtual
async def test_a_device_that_has_become_smaller_or_larger_is_what_it_is_now():
    models = Settings("a", bytes=30, devices=(GPU,)), Settings("b", devices=(GPU,))
    async with House(*models, totals={HOST: 100, GPU: 100}) as house:
        await house.until_answered(house.ask("a"))
        house.totals[GPU] = 50
        await until(lambda: house.ledger.view(GPU, time.monotonic()).total == 50, "it is seen")
        refused = house.ask("b")
        await house.until_answered(refused)
        assert isinstance(refused.outcomes[0], InsufficientMemory)
        assert house.state("a") is READY, "nobody went for what could not be had"
        house.totals[GPU] = 90
        await until(lambda: house.ledger.view(GPU, time.monotonic()).total == 90, "it is seen")
        served = house.ask("b")
        await house.until_answered(served, house.ask("a"))
        assert served.outcomes == ["served"]
        assert house.evicted == []


@virtual
async def test_several_replicas_have_a_hold_each_and_only_as_many_go_as_are_in_the_way():
    async with House(Settings("a", bytes=30, replicas=3), Settings("b", bytes=30)) as house:
        house.manager.load("a")
        await until(lambda: all(unit.replica.state is READY for unit in house.of("a")), "all three are there")
        await house.until_answered(house.ask("b"))
        assert sorted(unit.replica.state.value for unit in house.of("a")) == ["ready", "ready", "stopped"]
        assert house.evicted == ["a"]


@virtual
async def test_models_are_preloaded_in_order_as_far_as_they_fit_and_the_rest_is_not_wished_for_any_more():
    async with House(Settings("a", bytes=40), Settings("b", bytes=70), Settings("c", bytes=50)) as house:
        house.manager.preload("abc")
        assert house.manager.wanted("b")
        await until(lambda: not any(house.manager.wanted(model) for model in "abc"), "the start is over")
        await house.until_state("c", READY)
        assert [house.state(model) for model in "ab"] == [READY, STOPPED]


@pytest.mark.parametrize("moment", ["asked", "starting", "draining", "stopping", "backoff"])
@virtual
async def test_a_shutdown_at_any_moment_leaves_no_process_and_no_hold(moment):
    async with House(Settings("a", load_time=2, unload_time=2), Settings("b")) as house:
        if moment in ("draining", "stopping"):
            await house.until_answered(house.ask("a"))
            if moment == "draining":
                house.ask("a", takes=5)
            waiting = house.ask("b")
            await house.until_state("a", DRAINING if moment == "draining" else ReplicaState.STOPPING)
            house.leave(waiting)
            await until(lambda: moment == "stopping" or not house.life("a").taken, "what runs has ended")
        elif moment == "backoff":
            await house.until_answered(house.ask("a"))
            for _ in range(2):
                await house.until_state("a", READY)
                house.life("a").die()
                await until(lambda: house.state("a") is not READY, "its death is noticed")
            await house.until_state("a", ReplicaState.BACKOFF)
        else:
            house.leave(asked := house.ask("a"))
            assert asked.outcomes == ["left"]
            house.manager.load("a")
            if moment == "starting":
                await house.until_state("a", ReplicaState.STARTING)


# --- servers that live without us -------------------------------------------------------------------------------------


@virtual
async def test_a_server_that_has_its_model_already_is_held_and_adopted_without_anybodys_asking():
    async with House(Settings("a", remote=True)) as house:
        house.sources["a/0"].see("ready", "resident")
        await house.until_state("a", READY)
        house.check()
        assert house.ledger.held("a/0") == 60
        house.sources["a/0"].see("unloaded", "not_resident")


@virtual
async def test_a_server_of_unknown_state_keeps_its_hold_until_it_says_that_it_let_go():
    async with House(Settings("a", remote=True), Settings("b")) as house:
        await house.until_answered(house.ask("a"))
        house.sources["a/0"].see("unknown", "resident")
        house.manager.unload("a")
        await house.until_state("a", STOPPED)
        unit = house.of("a")[0]
        assert unit.phase is Phase.UNKNOWN
        assert house.ledger.held("a/0") == 60
        refused = house.ask("b")
        await house.until_answered(refused)
        assert isinstance(refused.outcomes[0], InsufficientMemory)

        house.sources["a/0"].see("unloaded", "not_resident")
        served = house.ask("b")
        await house.until_answered(served)
        assert served.outcomes == ["served"]
        assert house.ledger.held("a/0") == 0


@virtual
async def test_a_server_that_may_still_have_its_model_is_loaded_again_where_it_was_and_nowhere_else():
    totals = {HOST: 100, GPU: 100, "GPU-1": 100}
    async with House(Settings("a", remote=True, devices=(GPU, "GPU-1")), totals=totals) as house:
        await house.until_answered(house.ask("a"))
        house.sources["a/0"].see("failed", "unknown")
        house.manager.unload("a")
        await house.until_state("a", STOPPED)
        house.others[GPU] = 30  # the other one looks better now
        asked = house.ask("a")
        await house.until_answered(asked)
        assert asked.outcomes == ["served"]
        assert house.of("a")[0].device == GPU
        house.check()
        house.sources["a/0"].see("unloaded", "not_resident")
