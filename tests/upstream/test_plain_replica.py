"""A replica that is a server without a lifecycle: it can serve while its health path answers 2xx."""

from __future__ import annotations

from dataclasses import replace

from slimproc.replicas.states import ReplicaState
from slimproc.upstream.plain import endless_policy
from tests.fakes import eventually, looped
from tests.upstream.harness_upstream import HASTE, UpstreamKeeper, remote
from tests.upstream.standin import StandIn

S = ReplicaState


def plain(*urls: str):
    return remote(*urls, contract="none")


@looped
async def test_a_healthy_server_is_used_and_never_loaded_or_unloaded():
    async with StandIn(state="ready") as server, UpstreamKeeper(plain(server.url)) as keeper:
        life = await keeper.start()
        assert (life.slots, life.pid) == (2, None)
        assert keeper.replica.remains == ""
        assert keeper.replica.sighting is None
        await keeper.stop()
        assert (server.loads, server.unloads, server.counts.statuses) == (0, 0, 0)
        assert server.state == "ready"


@looped
async def test_an_unhealthy_server_is_left_out_until_it_is_well():
    async with StandIn(healthy=False) as server, UpstreamKeeper(plain(server.url)) as keeper:
        keeper.replica.ask_start()
        await eventually(lambda: keeper.states.count(S.BACKOFF) > 2, "it is tried again and again")
        assert keeper.replica.load_failed
        assert "/health answers 503" in keeper.replica.reason
        server.script.healthy = True
        first = await keeper.until_ready()
        server.script.healthy = False
        await eventually(lambda: keeper.replica.serving is not first, "it is left out")
        server.script.healthy = True
        await keeper.until_ready(after=first)


@looped
async def test_one_of_two_that_is_gone_is_left_out_and_the_other_serves():
    slow = replace(HASTE, serving=3600.0)
    async with StandIn() as one, StandIn() as two, UpstreamKeeper(plain(one.url, two.url), pace=slow) as keeper:
        for replica in keeper.replicas:
            replica.ask_start()
        await eventually(lambda: all(replica.serving for replica in keeper.replicas), "both serve")
        slot, other = keeper.take(), keeper.replicas[1].serving
        first = keeper.replica.serving
        await one.close()
        slot.note_unreachable("connection refused")
        assert first.free_slots == 0, "it is left out at once"
        slot.release()
        await eventually(lambda: keeper.replica.serving is None, "it is over with its last request")
        assert "connection refused" in keeper.replica.reason.lower()
        assert keeper.replicas[1].serving is other
        await one.open()
        await keeper.until_ready()


@looped
async def test_what_an_unwell_server_has_is_left_to_it_and_it_is_used_again_when_it_is_well():
    async with StandIn() as server, UpstreamKeeper(plain(server.url)) as keeper:
        life = await keeper.start()
        slot = keeper.take()
        server.script.healthy = False
        await eventually(lambda: not life.free_slots, "it gets no more work")
        assert slot.lost == ""
        changes = keeper.changes
        server.script.healthy = True
        await eventually(lambda: life.free_slots == 1, "it is trusted again")
        assert keeper.changes > changes, "admission is told"
        slot.release()
        assert keeper.replica.serving is life


@looped
async def test_a_drain_ends_with_our_last_request():
    async with StandIn() as server, UpstreamKeeper(plain(server.url)) as keeper:
        await keeper.start()
        slot = keeper.take()
        keeper.replica.ask_stop(3600.0)
        await keeper.until(S.DRAINING)
        slot.release()
        await keeper.until(S.STOPPED)


def test_it_is_never_given_up_and_looked_for_at_least_every_five_seconds():
    policy = endless_policy()
    waits = [policy.failed(float(now), permanent=True) for now in range(0, 4000, 5)]
    assert None not in waits
    assert max(waits) <= 5.0
    assert waits[0] == 0.0
