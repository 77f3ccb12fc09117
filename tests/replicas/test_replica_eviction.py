"""What residency asks of a replica: drains that may be given up, starts on a device, restarts that need permission."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from slimproc.replicas.restart import RestartPolicy
from slimproc.replicas.states import ReplicaState
from tests.fakes import eventually, looped, turns
from tests.replicas.harness import Keeper, script

S = ReplicaState
ENDLESS = script(tokens=["a"], repeat=1_000_000, token_latency=0.005)


# --- drains -----------------------------------------------------------------------------------------------------------


@looped
async def test_a_drain_that_is_abandoned_serves_on_with_the_same_engine():
    async with Keeper() as keeper:
        engine = await keeper.start()
        stream, slot = keeper.begin(ENDLESS, None)
        keeper.replica.ask_stop(3600.0, abandon=True)
        await keeper.until(S.DRAINING)
        changes = keeper.changes
        keeper.replica.abandon_drain()
        await keeper.until(S.READY)
        assert keeper.changes > changes, "admission is told that it may hand over again"
        assert keeper.replica.serving is engine
        assert not keeper.replica.drain_timed_out
        assert not stream.ended
        other = keeper.generate()
        await eventually(lambda: other.ended, "it serves")
        slot.cancel()


@looped
async def test_an_eviction_whose_drain_takes_too_long_is_given_up_and_cuts_nothing_off():
    async with Keeper() as keeper:
        await keeper.start()
        stream, slot = keeper.begin(ENDLESS, None)
        seen = []
        keeper.replica._on_change = lambda replica: seen.append((replica.state, replica.drain_timed_out))
        keeper.replica.ask_stop(0.05, abandon=True)
        await eventually(lambda: (S.READY, True) in seen, "it serves on, and says why")
        assert [state for state, _ in seen] == [S.DRAINING, S.READY]
        assert not stream.ended
        slot.cancel()
        await eventually(lambda: stream.ended, "it ends as it was asked")
        keeper.replica.ask_stop(3600.0, abandon=True)
        await keeper.until(S.STOPPED)
        assert not keeper.replica.drain_timed_out, "of the last drain"


@pytest.mark.parametrize("order", ["operator first", "eviction first", "both before it is heard"])
@looped
async def test_an_operators_stop_is_not_abandoned_whoever_else_evicts(order):
    async with Keeper() as keeper:
        await keeper.start()
        stream = keeper.generate(ENDLESS, None)
        evicting = order == "eviction first"
        keeper.replica.ask_stop(3600.0, abandon=evicting)
        if order != "both before it is heard":
            await keeper.until(S.DRAINING)
        keeper.replica.ask_stop(3600.0, abandon=not evicting)
        await keeper.until(S.DRAINING)
        keeper.replica.abandon_drain()
        await turns(20)
        assert keeper.replica.state is S.DRAINING
        keeper.replica.ask_stop(0.0, abandon=True)
        await keeper.until(S.STOPPED)
        assert stream.error is not None


@looped
async def test_a_drain_that_has_ended_cannot_be_abandoned():
    async with Keeper(unload_time=0.2) as keeper:
        await keeper.start()
        keeper.replica.ask_stop(3600.0, abandon=True)
        await keeper.until(S.STOPPING)
        keeper.replica.abandon_drain()
        await keeper.until(S.STOPPED)
        assert S.READY not in keeper.states[3:]


@looped
async def test_a_drain_that_is_abandoned_before_it_is_heard_of_unloads_nothing():
    async with Keeper() as keeper:
        engine = await keeper.start()
        keeper.replica.ask_stop(3600.0, abandon=True)
        keeper.replica.abandon_drain()
        await eventually(lambda: S.DRAINING in keeper.states and keeper.replica.state is S.READY, "it serves on")
        assert keeper.replica.serving is engine


@looped
async def test_abandoning_without_a_drain_changes_nothing():
    async with Keeper() as keeper:
        keeper.replica.abandon_drain()
        await keeper.start()
        keeper.replica.abandon_drain()
        await turns(20)
        assert keeper.states == [S.STOPPED, S.STARTING, S.READY]


@looped
async def test_a_start_that_is_asked_in_a_drain_comes_after_it_and_goes_where_it_was_asked_to():
    async with Keeper() as keeper:
        first = await keeper.start()
        slot = first.take_slot()
        keeper.replica.ask_stop(3600.0)
        await keeper.until(S.DRAINING)
        keeper.replica.ask_start(device="GPU-2")
        await turns(20)
        assert keeper.replica.device is None, "what still runs is where it was"
        slot.cancel()
        await keeper.until_ready(after=first)
        assert keeper.replica.device == "GPU-2"


def environment_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


# --- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody shows a process's environment")
@pytest.mark.parametrize(
    ("device", "variable"), [(None, "0"), ("host", ""), ("GPU-1", "GPU-1")], ids=["anywhere", "host", "a GPU"]
)
@looped
async def test_an_engine_sees_the_device_that_it_is_started_on_also_after_a_crash(device, variable):
    async with Keeper(environ=dict(os.environ) | {"CUDA_VISIBLE_DEVICES": "0"}) as keeper:
        keeper.replica.ask_start(device=device)
        first = await keeper.until_ready()
        wanted = f"CUDA_VISIBLE_DEVICES={variable}".encode()
        assert wanted in environment_of(first.pid)
        os.kill(first.pid, signal.SIGKILL)
        second = await keeper.until_ready(after=first)
        assert wanted in environment_of(second.pid)
        assert keeper.replica.device == device
        assert keeper.replica.statistics().device == device


@looped
async def test_a_start_without_a_device_goes_where_it_was_last():
    async with Keeper() as keeper:
        keeper.replica.ask_start(device="GPU-1")
        await keeper.until_ready()
        await keeper.stop()
        await keeper.start()
        assert keeper.replica.device == "GPU-1"


@looped
async def test_a_start_of_what_runs_does_not_move_it():
    async with Keeper() as keeper:
        keeper.replica.ask_start(device="GPU-1")
        await keeper.until_ready()
        keeper.replica.ask_start(device="GPU-2")
        await turns(20)
        assert keeper.replica.device == "GPU-1"


# --- permission to restart ----------------------------------------------------------------------------------------------


@looped
async def test_a_restart_that_is_not_permitted_waits_and_asks_again():
    async with Keeper() as keeper:
        first = await keeper.start()
        asked, allowed = [], False

        def may_start(replica) -> bool:
            asked.append(replica)
            return allowed

        keeper.replica.may_start = may_start
        os.kill(first.pid, signal.SIGKILL)
        await eventually(lambda: len(asked) >= 2, "it asks again")
        assert keeper.replica.state is S.BACKOFF
        assert set(asked) == {keeper.replica}
        assert keeper.replica.restarts == 0
        allowed = True
        await keeper.until_ready(after=first)
        assert keeper.replica.restarts == 1


@looped
async def test_a_replica_that_waits_for_permission_can_be_stopped():
    async with Keeper() as keeper:
        first = await keeper.start()
        keeper.replica.may_start = lambda _: False
        os.kill(first.pid, signal.SIGKILL)
        await keeper.until(S.BACKOFF)
        await keeper.stop()
        assert keeper.states[-2:] == [S.BACKOFF, S.STOPPED]


@looped
async def test_failures_that_are_forgiven_do_not_count():
    policy = RestartPolicy(first_wait=0.0, limit=2)
    async with Keeper(policy=policy, load_error="no") as keeper:
        keeper.replica.ask_start()
        await keeper.until(S.FAILED)
        assert policy.failures == 2
        keeper.replica.forgive()
        assert policy.failures == 0


@looped
async def test_who_never_gives_up_says_the_same_failure_once(caplog):
    caplog.set_level("INFO")
    policy = RestartPolicy(first_wait=0.0, endless=True, limit=2)
    async with Keeper(policy=policy, load_error="no") as keeper:
        keeper.replica.ask_start()
        await eventually(lambda: keeper.states.count(S.BACKOFF) >= 4, "it goes on")
        told = [record for record in caplog.records if record.getMessage() == "an engine is lost"]
        assert len(told) == 1
        assert S.FAILED not in keeper.states


# --- instants -----------------------------------------------------------------------------------------------------------


@looped
async def test_idleness_counts_from_the_end_of_the_last_request():
    async with Keeper() as keeper:
        replica = keeper.replica
        await keeper.start()
        ready = replica.resident_since
        assert replica.idle_since == ready > 0
        stream, slot = keeper.begin(ENDLESS, None)
        await eventually(lambda: stream.completion_tokens, "it runs")
        assert replica.idle_since == ready
        assert replica.occupied == 1
        slot.cancel()
        await eventually(lambda: stream.ended, "it ends")
        assert replica.idle_since > ready
        assert replica.resident_since == ready
        assert replica.occupied == 0


@looped
async def test_a_shutdown_stops_engines_as_an_ordinary_stop_does():
    async with Keeper() as keeper:
        engine = await keeper.start()
        keeper.replica.ask_stop(0.0, 10.0, leave=True)
        async with asyncio.timeout(20):
            await keeper.replica.wait_stopped()
        assert engine.status is not None
        assert engine.status.code == 0
        assert keeper.replica.remains == ""
        assert keeper.replica.sighting is None
