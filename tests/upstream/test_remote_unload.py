"""A remote server with the control contract is drained, unloaded, and let go at our own end."""

from __future__ import annotations

import pytest

from slimproc.replicas.states import ReplicaState
from tests.fakes import eventually, looped, turns
from tests.upstream.harness_upstream import UpstreamKeeper, remote
from tests.upstream.standin import StandIn

S = ReplicaState


@looped
async def test_a_drain_waits_for_what_is_forwarded_and_for_what_the_server_counts():
    async with StandIn() as server, UpstreamKeeper(remote(server.url)) as keeper:
        await keeper.start()
        slot = keeper.take()
        server.script.extra_active = 1
        keeper.replica.ask_stop(3600.0)
        await keeper.until(S.DRAINING)
        assert keeper.replica.serving is None
        slot.release()
        before = server.counts.statuses
        await eventually(lambda: server.counts.statuses > before + 3, "it looks again and again")
        assert keeper.replica.state is S.DRAINING
        assert server.unloads == 0
        server.script.extra_active = 0
        await keeper.until(S.STOPPED)
        assert server.unloads == 1
        assert server.state == "unloaded"
        assert keeper.replica.remains == ""


@looped
async def test_an_abandoned_drain_serves_on_and_unloads_nothing():
    async with StandIn() as server, UpstreamKeeper(remote(server.url)) as keeper:
        life = await keeper.start()
        server.script.extra_active = 1
        keeper.replica.ask_stop(3600.0, abandon=True)
        await keeper.until(S.DRAINING)
        keeper.replica.abandon_drain()
        await keeper.until(S.READY)
        assert keeper.replica.serving is life
        keeper.take().release()
        assert server.unloads == 0


@looped
async def test_an_unload_takes_its_time_and_is_done_when_the_server_says_so():
    async with StandIn(unload_time=0.2) as server, UpstreamKeeper(remote(server.url)) as keeper:
        await keeper.start()
        keeper.replica.ask_stop(0.0)
        await keeper.until(S.STOPPING)
        assert server.state in ("ready", "unloading")
        await keeper.until(S.STOPPED)
        assert server.state == "unloaded"


@looped
async def test_an_unload_that_outlives_its_limit_has_failed_and_ends_when_the_server_lets_go():
    async with StandIn(unload_time=0.6) as server, UpstreamKeeper(remote(server.url), unload_timeout=0.1) as keeper:
        failures = []
        keeper.replica.on_unload_failed = failures.append
        await keeper.start()
        server.script.unload_time = 3600
        keeper.replica.ask_stop(0.0)
        await eventually(lambda: keeper.replica.unload_failed, "it has failed")
        assert failures == [keeper.replica]
        assert "not unloaded within 0.1 s" in keeper.replica.unload_failed
        server.residency = "not_resident"  # which counts for nothing while it is unloading
        await turns(50)
        assert keeper.replica.state is S.STOPPING, "it keeps its hold"
        server.state = "unloaded"
        await keeper.until(S.STOPPED)
        assert keeper.replica.unload_failed == ""
        assert keeper.replica.remains == ""


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ({"unload_refused": (500, "STUCK")}, "STUCK"),
        ({"unload_ignored": True}, "answered an unload with ready"),
    ],
    ids=["refused", "a lie"],
)
@looped
async def test_an_unload_that_comes_to_nothing_ends_with_a_server_that_can_be_adopted(script, words):
    async with StandIn(**script) as server, UpstreamKeeper(remote(server.url)) as keeper:
        await keeper.start()
        keeper.replica.ask_stop(0.0)
        await eventually(lambda: keeper.replica.unload_failed, "it has failed")
        assert words in keeper.replica.unload_failed
        await keeper.until(S.STOPPED)
        await keeper.until_seen("ready")
        assert keeper.replica.resident_already
        await keeper.start()
        assert server.loads == 1


@looped
async def test_a_server_that_is_failed_after_its_unload_keeps_its_hold_and_can_be_loaded_again():
    async with StandIn(unload_refused=(500, "STUCK")) as server, UpstreamKeeper(remote(server.url)) as keeper:
        await keeper.start()
        keeper.replica.ask_stop(0.0)
        await eventually(lambda: keeper.replica.unload_failed, "it has failed")
        server.state, server.last_error = "failed", {"code": "DEAD", "message": "the runtime is gone"}
        await keeper.until(S.STOPPED)
        assert keeper.replica.remains == "its server is failed: DEAD: the runtime is gone"
        await keeper.start()
        assert server.loads == 2


@looped
async def test_an_unload_of_a_server_that_is_busy_is_asked_again():
    async with StandIn(unload_refused=(409, "BUSY")) as server, UpstreamKeeper(remote(server.url)) as keeper:
        await keeper.start()
        keeper.replica.ask_stop(0.0)
        await eventually(lambda: server.unloads > 2, "it asks again")
        server.script.unload_refused = None
        await keeper.until(S.STOPPED)
        assert keeper.replica.unload_failed == ""
        assert server.state == "unloaded"


@looped
async def test_a_forced_unload_tells_those_who_forward():
    async with StandIn() as server, UpstreamKeeper(remote(server.url)) as keeper:
        await keeper.start()
        slot = keeper.take()
        keeper.replica.ask_stop(0.0)
        await eventually(lambda: slot.lost, "it is told")
        slot.release()
        await keeper.until(S.STOPPED)


@looped
async def test_a_shutdown_leaves_the_model_in_memory_and_does_not_wait_for_it():
    async with StandIn() as server:
        async with UpstreamKeeper(remote(server.url)) as keeper:
            await keeper.start()
            slot = keeper.take()
            keeper.replica.ask_stop(0.0, 1.0, leave=True)
            await keeper.until(S.STOPPED)
            assert slot.lost
            slot.release()
        assert (server.state, server.unloads) == ("ready", 0)


@looped
async def test_a_shutdown_does_not_wait_for_an_unload_that_is_under_way():
    async with StandIn(unload_time=3600) as server, UpstreamKeeper(remote(server.url)) as keeper:
        await keeper.start()
        keeper.replica.ask_stop(0.0)
        await eventually(lambda: server.unloads, "it unloads")
        keeper.replica.ask_stop(0.0, 1.0, leave=True)
        await keeper.until(S.STOPPED)
