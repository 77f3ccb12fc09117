"""A replica that is a remote server with the control contract: adopted, loaded, watched, and looked at between lives."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from slimproc.replicas.states import ReplicaState
from tests.fakes import eventually, looped, turns
from tests.upstream.harness_upstream import HASTE, UpstreamKeeper, closed_port, remote
from tests.upstream.standin import StandIn

S = ReplicaState


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [False, True], ids=["answered at once", "answered when loaded"])
@looped
async def test_a_server_is_loaded_and_serves(waits):
    async with StandIn(load_time=0.1, load_waits=waits) as server, UpstreamKeeper(remote(server.url)) as keeper:
        assert keeper.replica.serving is None
        life = await keeper.start()
        assert keeper.states == [S.STOPPED, S.STARTING, S.READY]
        assert (server.loads, server.unloads) == (1, 0)
        assert (life.free_slots, life.slots, life.pid) == (2, 2, None)
        assert life.load_seconds >= 0.1
        assert keeper.metrics.loads == {"ok": 1, "failed": 0}
        assert keeper.replica.engine is None
        assert keeper.replica.statistics().slots == 2


@looped
async def test_a_server_that_is_ready_is_adopted_without_a_load():
    """A restart of ours while the model is resident: it reconciles to ready, and nothing is loaded again."""
    async with StandIn(state="ready") as server, UpstreamKeeper(remote(server.url)) as keeper:
        await keeper.until_seen("ready")
        assert keeper.replica.resident_already
        assert keeper.replica.remains
        assert keeper.replica.state is S.STOPPED
        await keeper.start()
        assert server.loads == 0


@looped
async def test_a_load_that_somebody_else_began_is_waited_for():
    async with StandIn(state="loading") as server, UpstreamKeeper(remote(server.url)) as keeper:
        await keeper.until_seen("loading")
        keeper.replica.ask_start()
        await keeper.until(S.STARTING)
        server.state = "ready"
        await keeper.until_ready()
        assert server.loads == 0


@looped
async def test_a_server_that_is_being_unloaded_is_loaded_when_it_is():
    async with StandIn(state="unloading") as server, UpstreamKeeper(remote(server.url)) as keeper:
        keeper.replica.ask_start()
        before = server.counts.statuses
        await eventually(lambda: server.counts.statuses > before + 2, "it looks")
        assert server.loads == 0
        server.state = "unloaded"
        await keeper.until_ready()
        assert server.loads == 1


@looped
async def test_a_load_that_fails_is_told_at_once_with_the_servers_reason_and_not_tried_again():
    async with StandIn(load_fails="out of memory") as server, UpstreamKeeper(remote(server.url)) as keeper:
        keeper.replica.ask_start()
        await keeper.until(S.FAILED)
        assert "out of memory" in keeper.replica.reason
        assert keeper.replica.load_failed
        assert server.loads == 1
        assert keeper.replica.remains, "a failed model keeps its hold"
        server.script.load_fails = ""
        keeper.replica.ask_start()
        await keeper.until_ready()
        assert keeper.replica.reason == ""


@pytest.mark.parametrize("residency", ["unknown", "resident", "not_resident"])
@looped
async def test_a_load_that_outlives_its_limit_has_failed_and_keeps_its_hold(residency):
    """Whatever it says of its memory: who loads may take it at any moment."""
    async with StandIn(load_time=3600) as server, UpstreamKeeper(remote(server.url), load_timeout=0.2) as keeper:
        server.while_loading = residency
        keeper.replica.ask_start()
        await keeper.until(S.FAILED)
        assert "did not load within 0.2 s" in keeper.replica.reason
        await turns(50)
        assert server.loads == 1, "nothing is tried again by itself"
        assert keeper.replica.remains == "its server is loading"


@looped
async def test_a_server_that_goes_silent_in_its_load_keeps_its_hold_until_it_says_that_it_is_unloaded():
    """Neither the load is answered nor any status, and the last word before was that it had nothing in memory."""
    async with (
        StandIn(load_time=3600, load_waits=True) as server,
        UpstreamKeeper(remote(server.url), load_timeout=0.3, status_timeout=0.05) as keeper,
    ):
        await keeper.until_seen("unloaded")
        keeper.replica.ask_start()
        await eventually(lambda: server.loads, "it loads")
        server.script.status_time = 3600
        await keeper.until(S.FAILED)
        await keeper.until_seen("unknown")
        assert "did not answer" in keeper.replica.remains
        server.script.status_time, server.state = 0.0, "unloaded"
        await eventually(lambda: not keeper.replica.remains, "its word counts again")


@looped
async def test_a_server_that_says_unloaded_while_the_answer_to_its_load_is_due_is_not_believed():
    """It tells what was before it heard of the load."""
    async with (
        StandIn(load_time=3600, load_waits=True) as server,
        UpstreamKeeper(remote(server.url)) as keeper,
    ):
        await keeper.until_seen("unloaded")
        server.script.status_answer = json.dumps(server.describe())
        keeper.replica.ask_start()
        await eventually(lambda: server.loads, "it loads")
        before = server.counts.statuses
        await eventually(lambda: server.counts.statuses > before + 3, "it is asked")
        assert keeper.replica.remains


@looped
async def test_a_load_that_the_server_refuses_leaves_no_doubt_of_its_memory():
    async with StandIn(load_refused=(500, "BROKEN")) as server, UpstreamKeeper(remote(server.url)) as keeper:
        keeper.replica.ask_start()
        await keeper.until(S.FAILED)
        assert keeper.replica.remains == ""


@looped
async def test_a_load_whose_answer_never_comes_ends_at_its_limit():
    """Nor does any status while it loads."""
    async with (
        StandIn(load_time=3600, load_waits=True) as server,
        UpstreamKeeper(remote(server.url), load_timeout=0.3, watched=False) as keeper,
    ):
        keeper.replica.ask_start()
        await eventually(lambda: server.loads, "it loads")
        server.script.status_time = 3600
        await keeper.until(S.FAILED)
        assert "did not load within 0.3 s" in keeper.replica.reason


@looped
async def test_a_busy_refusal_of_a_load_is_tried_again_and_another_is_not():
    async with StandIn(load_refused=(409, "BUSY")) as server, UpstreamKeeper(remote(server.url)) as keeper:
        keeper.replica.ask_start()
        await eventually(lambda: server.loads == 2, "it asks again")
        server.script.load_refused = (500, "BROKEN")
        await keeper.until(S.FAILED)
        assert "BROKEN" in keeper.replica.reason


@looped
async def test_a_server_that_dies_while_it_loads_is_known_at_once():
    async with StandIn(load_time=3600) as server, UpstreamKeeper(remote(server.url)) as keeper:
        keeper.replica.ask_start()
        await eventually(lambda: server.state == "loading", "it loads")
        await server.die()
        await eventually(lambda: S.BACKOFF in keeper.states or keeper.replica.state is S.FAILED, "its death is known")
        assert keeper.replica.load_failed
        assert keeper.replica.remains, "nobody has said that its memory is free"
        assert "cannot be reached" in keeper.replica.reason


@looped
async def test_a_stop_while_it_loads_unloads_it():
    async with StandIn(load_time=3600) as server, UpstreamKeeper(remote(server.url)) as keeper:
        keeper.replica.ask_start()
        await eventually(lambda: server.state == "loading", "it loads")
        await keeper.stop()
        assert server.unloads == 1
        assert keeper.states == [S.STOPPED, S.STARTING, S.STOPPING, S.STOPPED]


# --- serving ----------------------------------------------------------------------------------------------------------


@looped
async def test_slots_are_as_many_as_its_concurrency_and_a_release_counts_once():
    async with StandIn() as server, UpstreamKeeper(remote(server.url)) as keeper:
        life = await keeper.start()
        first, second = keeper.take(), keeper.take()
        assert (life.free_slots, life.occupied, keeper.replica.sequences) == (0, 2, 2)
        assert (first.base_url, first.engine_name) == (server.url, "m/0")
        changes, idle = keeper.changes, keeper.replica.idle_since
        first.release()
        first.cancel()
        assert life.free_slots == 1
        assert keeper.changes == changes + 1
        assert keeper.replica.idle_since > idle
        second.release()


@pytest.mark.parametrize("becomes", ["unloaded", "failed", "loading"])
@looped
async def test_a_server_that_is_not_ready_any_more_is_left_and_started_again(becomes):
    async with StandIn() as server, UpstreamKeeper(remote(server.url)) as keeper:
        first = await keeper.start()
        slot = keeper.take()
        lost = []
        slot.on_lost = lost.append
        server.state = becomes
        await eventually(lambda: S.BACKOFF in keeper.states, "it is noticed")
        assert becomes in lost[0]
        assert slot.lost == lost[0]
        server.state = "unloaded"
        await keeper.until_ready(after=first)


@looped
async def test_a_server_that_is_gone_is_noticed_and_its_memory_counts_until_it_says_otherwise():
    async with StandIn() as server, UpstreamKeeper(remote(server.url)) as keeper:
        first = await keeper.start()
        await server.close()
        await eventually(lambda: S.BACKOFF in keeper.states, "it is noticed")
        sighting = keeper.replica.sighting
        assert (sighting.state, sighting.residency) == ("unknown", "resident")
        assert "its server is unknown" in keeper.replica.remains
        await server.open()
        await keeper.until_ready(after=first)
        assert server.loads == 1, "it was adopted"


@looped
async def test_what_a_silent_server_has_may_yet_be_answered_and_it_may_come_back():
    async with StandIn() as server, UpstreamKeeper(remote(server.url)) as keeper:
        life = await keeper.start()
        slot = keeper.take()
        await server.close()
        await eventually(lambda: not life.free_slots, "it gets no more work")
        assert keeper.replica.state is S.READY
        assert slot.lost == ""
        changes = keeper.changes
        await server.open()
        await eventually(lambda: life.free_slots == 1, "it is trusted again")
        assert keeper.changes > changes, "admission is told"
        slot.release()
        assert keeper.replica.serving is life


@looped
async def test_a_busy_server_may_be_silent_and_an_idle_one_may_not():
    async with StandIn() as server, UpstreamKeeper(remote(server.url), status_timeout=0.02) as keeper:
        life = await keeper.start()
        slot = keeper.take()
        server.script.status_time = 3600.0
        before = server.counts.statuses
        await eventually(lambda: server.counts.statuses > before + 5, "it is asked in vain")
        assert keeper.replica.serving is life
        assert life.free_slots == 1
        slot.release()
        await eventually(lambda: S.BACKOFF in keeper.states, "it is noticed")
        assert "did not answer" in keeper.replica.reason


@looped
async def test_a_server_that_nobody_can_forward_to_is_looked_at_at_once():
    slow = replace(HASTE, serving=3600.0)
    async with StandIn() as server, UpstreamKeeper(remote(server.url), pace=slow) as keeper:
        life = await keeper.start()
        slot = keeper.take()
        await server.close()
        slot.note_unreachable("connection refused")
        await eventually(lambda: not life.free_slots, "it gets no more work")
        slot.release()
        await eventually(lambda: S.BACKOFF in keeper.states, "it is over with its last request")


# --- between lives ------------------------------------------------------------------------------------------------------


@looped
async def test_a_closed_port_stays_unknown_and_counts_as_memory():
    async with UpstreamKeeper(remote(f"http://127.0.0.1:{closed_port()}")) as keeper:
        await eventually(lambda: keeper.replica.sighting.asked, "it was asked")
        sighting = keeper.replica.sighting
        assert (sighting.state, sighting.residency) == ("unknown", None)
        assert "cannot be reached" in keeper.replica.remains
        assert not keeper.replica.resident_already


@looped
async def test_before_it_was_asked_a_server_may_hold_memory():
    keeper = UpstreamKeeper(remote("http://127.0.0.1:1"))
    assert "not been asked" in keeper.replica.remains


@looped
async def test_what_is_seen_between_lives_follows_the_server():
    async with StandIn() as server, UpstreamKeeper(remote(server.url)) as keeper:
        await keeper.until_seen("unloaded")
        assert keeper.replica.remains == ""
        changes = keeper.changes
        server.state, server.last_error = "failed", {"code": "OOM", "message": "no room"}
        await keeper.until_seen("failed")
        assert keeper.changes > changes
        assert keeper.replica.remains == "its server is failed: OOM: no room"
        await server.close()
        await keeper.until_seen("unknown")
        assert keeper.replica.sighting.residency == "unknown"
        server.state = "unloaded"
        await server.open()
        await keeper.until_seen("unloaded")
        await server.close()
        await keeper.until_seen("unknown")
        assert keeper.replica.sighting.residency == "not_resident", "a look that fails replaces nothing"
        assert keeper.replica.remains == ""


@looped
async def test_a_stranger_that_answers_200_to_everything_is_not_ready():
    async with StandIn(status_answer='{"status": "ok"}') as server:
        async with UpstreamKeeper(remote(server.url)) as keeper:
            keeper.replica.ask_start()
            await eventually(lambda: keeper.replica.load_failed, "it is refused")
            assert "answered no control status" in keeper.replica.reason
            assert S.READY not in keeper.states
        assert server.loads == 0


@looped
async def test_a_stranger_that_takes_the_port_of_a_ready_server_is_noticed():
    async with StandIn() as server, UpstreamKeeper(remote(server.url)) as keeper:
        await keeper.start()
        server.script.status_answer = "hello"
        await eventually(lambda: S.BACKOFF in keeper.states, "it is noticed")
        server.script.status_answer = None
        assert keeper.replica.sighting.residency == "resident"


@looped
async def test_several_servers_of_a_model_are_replicas_of_their_own():
    async with StandIn() as one, StandIn() as two, UpstreamKeeper(remote(one.url, two.url)) as keeper:
        for replica in keeper.replicas:
            replica.ask_start()
        await eventually(lambda: all(replica.serving for replica in keeper.replicas), "both serve")
        urls = [replica.serving.take_slot().base_url for replica in keeper.replicas]
        assert urls == [one.url, two.url]
        assert [replica.name for replica in keeper.replicas] == ["m/0", "m/1"]


@looped
async def test_starting_and_stopping_again_and_again_leaves_no_task_behind():
    async with StandIn() as server, UpstreamKeeper(remote(server.url)) as keeper:
        await keeper.start()
        await keeper.stop()
        before = len(asyncio.all_tasks())
        for _ in range(5):
            await keeper.start()
            await keeper.stop()
        await eventually(lambda: len(asyncio.all_tasks()) <= before + 1, "no task is left")
        assert (server.loads, server.unloads) == (6, 6)
