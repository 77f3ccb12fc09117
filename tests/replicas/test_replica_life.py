"""A replica's orderly life with a real engine process: start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import os

import pytest

from slimproc.errors import EngineCrashed, EngineError, InvalidRequest
from slimproc.ipc.wire import Detokenize, Tokenize
from slimproc.replicas.replica import Replica
from slimproc.replicas.states import ReplicaState
from slimproc.replicas.supervisor import Supervisor
from slimproc.request import Finish
from tests.fakes import eventually, looped, turns
from tests.replicas.harness import Keeper, exists, script

S = ReplicaState
CREDITS = ["eventfd", "pipe"] if hasattr(os, "eventfd") else ["pipe"]


@pytest.mark.parametrize("credit", CREDITS)
@looped
async def test_a_replica_starts_serves_and_stops(credit):
    async with Keeper(credit=credit, load_time=0.1) as keeper:
        replica = keeper.replica
        assert replica.serving is None
        engine = await keeper.start()
        assert keeper.states == [S.STOPPED, S.STARTING, S.READY]
        assert engine.free_slots == engine.model.slots == 2
        stream = keeper.generate(max_tokens=3)
        assert (engine.free_slots, replica.sequences) == (1, 1)
        await eventually(lambda: stream.ended, "the stream ends")
        assert stream.text == " tok0 tok1 tok2"
        assert stream.finish is Finish.LENGTH
        assert stream.usage.completion_tokens == stream.completion_tokens == 3
        assert engine.free_slots == 2
        pid = engine.process.pid
        await keeper.stop()
        assert keeper.states == [S.STOPPED, S.STARTING, S.READY, S.DRAINING, S.STOPPING, S.STOPPED]
        assert engine.status is not None
        assert engine.status.code == 0, engine.status
        assert not exists(pid)
        assert replica.statistics().tokens == 3
        assert replica.reason == ""


@looped
async def test_ready_is_told_by_the_loop_after_the_load_with_its_progress():
    async with Keeper(load_time=0.4) as keeper:
        keeper.replica.ask_start()
        seen = await eventually(lambda: 0 < keeper.replica.statistics().progress < 1, "the load makes progress")
        assert seen
        assert keeper.replica.state is S.STARTING
        await keeper.until_ready()
        statistics = keeper.replica.statistics()
        assert (statistics.progress, statistics.state) == (1.0, "ready")
        assert keeper.metrics.loads == {"ok": 1, "failed": 0}
        assert keeper.metrics.load_seconds.sum >= 0.4


@looped
async def test_a_ready_replica_that_is_asked_to_start_goes_on():
    async with Keeper() as keeper:
        engine = await keeper.start()
        keeper.replica.ask_start()
        await turns()
        assert keeper.replica.serving is engine
        stream = keeper.generate()
        await eventually(lambda: stream.ended, "it serves")


@looped
async def test_each_sequence_gets_its_own_answer_from_one_batch():
    async with Keeper(slots=4) as keeper:
        await keeper.start()
        streams = [
            keeper.generate(script(tokens=[f"{index}a", f"{index}b"], token_latency=0.005), None) for index in range(4)
        ]
        await eventually(lambda: all(stream.ended for stream in streams), "all end")
        assert [stream.text for stream in streams] == [f"{index}a{index}b" for index in range(4)]


@looped
async def test_what_the_engine_refuses_fails_that_sequence_alone():
    async with Keeper() as keeper:
        engine = await keeper.start()
        good = keeper.generate(script(tokens=["a"] * 20, token_latency=0.005), None)
        bad = keeper.generate("!fake {")
        await eventually(lambda: bad.ended, "the bad one ends")
        assert isinstance(bad.error, InvalidRequest)
        failing = keeper.generate(script(tokens=["a"], error_at=1))
        await eventually(lambda: failing.ended and good.ended, "both end")
        assert isinstance(failing.error, EngineError)
        assert good.text == "a" * 20
        assert engine.free_slots == 2


@looped
async def test_cancelling_ends_a_sequence_in_the_engine_and_frees_its_slot():
    async with Keeper() as keeper:
        engine = await keeper.start()
        stream, slot = keeper.begin(script(tokens=["a"], repeat=1_000_000, token_latency=0.005), None)
        await eventually(lambda: stream.completion_tokens, "it runs")
        slot.cancel()
        slot.cancel()
        await eventually(lambda: engine.free_slots == 2, "the slot is free")
        assert stream.finish is Finish.CANCELLED
        assert 0 < stream.usage.completion_tokens < 1_000_000


@looped
async def test_a_slot_that_was_never_used_is_free_again_at_once():
    async with Keeper() as keeper:
        engine = await keeper.start()
        before, slot = keeper.changes, engine.take_slot()
        assert engine.free_slots == 1
        slot.cancel()
        assert engine.free_slots == 2
        assert keeper.changes == before + 1


@looped
async def test_questions_are_answered_also_between_steps_and_also_large_ones():
    async with Keeper() as keeper:
        engine = await keeper.start()
        stream, slot = keeper.begin(script(tokens=["a"], repeat=1_000_000, token_latency=0.01), None)
        await eventually(lambda: stream.completion_tokens, "it runs")
        text = "wörter " * 60_000
        answers = await asyncio.gather(
            *(engine.ask(lambda number: Tokenize(number, text, add_special=True, parse_special=True)) for _ in range(3))
        )
        assert len({len(answer.tokens) for answer in answers}) == 1
        back = await engine.ask(lambda number: Detokenize(number, answers[0].tokens))
        assert back.text == text
        with pytest.raises(InvalidRequest, match="not in this model's vocabulary"):
            await engine.ask(lambda number: Detokenize(number, [10**9]))
        slot.cancel()


@looped
async def test_stopping_waits_for_what_is_in_flight():
    async with Keeper() as keeper:
        await keeper.start()
        stream = keeper.generate(script(tokens=["a"] * 30, token_latency=0.01), None)
        await eventually(lambda: stream.completion_tokens, "it runs")
        await keeper.stop(drain_limit=20)
        assert stream.text == "a" * 30
        assert stream.error is None


@looped
async def test_a_drain_waits_for_a_slot_that_was_taken_and_not_used_yet():
    async with Keeper() as keeper:
        engine = await keeper.start()
        slot, stream = engine.take_slot(), keeper.generate()
        keeper.replica.ask_stop(20.0)
        await eventually(lambda: stream.ended, "the other one ends")
        await turns()
        assert keeper.replica.state is S.DRAINING
        assert keeper.replica.serving is None
        slot.cancel()
        async with asyncio.timeout(20):
            await keeper.replica.wait_stopped()


@looped
async def test_a_drain_that_takes_too_long_ends_what_is_in_flight():
    async with Keeper() as keeper:
        await keeper.start()
        stream = keeper.generate(script(tokens=["a"], repeat=1_000_000, token_latency=0.01), None)
        await eventually(lambda: stream.completion_tokens, "it runs")
        await keeper.stop(drain_limit=0.05)
        assert isinstance(stream.error, EngineCrashed)
        assert stream.ends == 1
        assert keeper.states[-3:] == [S.DRAINING, S.STOPPING, S.STOPPED]


@looped
async def test_asking_again_moves_the_drain_limit():
    async with Keeper() as keeper:
        await keeper.start()
        stream = keeper.generate(script(tokens=["a"], repeat=1_000_000, token_latency=0.01), None)
        await eventually(lambda: stream.completion_tokens, "it runs")
        keeper.replica.ask_stop(3600.0)
        await keeper.until(S.DRAINING)
        await keeper.stop(drain_limit=0.0)
        assert stream.ended


@looped
async def test_a_replica_that_loads_is_stopped_without_waiting_for_the_load():
    async with Keeper(load_time=20) as keeper:
        keeper.replica.ask_start()
        await eventually(lambda: keeper.replica.statistics().progress, "it loads")
        await keeper.stop()
        assert keeper.states == [S.STOPPED, S.STARTING, S.STOPPING, S.STOPPED]


@looped
async def test_stopping_twice_or_when_stopped_changes_nothing():
    async with Keeper() as keeper:
        await keeper.stop()
        assert keeper.states == [S.STOPPED]
        await keeper.start()
        keeper.replica.ask_stop(0.0)
        keeper.replica.ask_stop(0.0)
        async with asyncio.timeout(20):
            await keeper.replica.wait_stopped()
        await turns(20)
        assert keeper.states == [S.STOPPED, S.STARTING, S.READY, S.DRAINING, S.STOPPING, S.STOPPED]


@looped
async def test_a_start_asked_on_the_way_down_waits_for_the_end_which_others_see():
    async with Keeper(unload_time=0.1) as keeper:
        first = await keeper.start()
        keeper.replica.ask_stop(0.0)
        await keeper.until(S.STOPPING)
        keeper.replica.ask_start()
        async with asyncio.timeout(20):
            await keeper.replica.wait_stopped()
        second = await keeper.until_ready()
        assert second is not first
        assert keeper.states == [S.STOPPED, S.STARTING, S.READY, S.DRAINING, S.STOPPING, S.STOPPED, S.STARTING, S.READY]


@looped
async def test_the_last_word_counts_when_start_and_stop_are_asked_on_the_way_down():
    async with Keeper(unload_time=0.1) as keeper:
        await keeper.start()
        keeper.replica.ask_stop(0.0)
        await keeper.until(S.STOPPING)
        keeper.replica.ask_start()
        keeper.replica.ask_stop(0.0)
        await keeper.until(S.STOPPED)
        await turns(20)
        assert keeper.replica.state is S.STOPPED


@looped
async def test_an_engine_that_ignores_everything_is_killed_within_the_exit_limit():
    async with Keeper(ignore_sigterm=True, hang_in_unload=True) as keeper:
        engine = await keeper.start()
        await keeper.stop(exit_limit=0.2)
        assert engine.status is not None
        assert engine.status.signal_name == "SIGKILL"


@looped
async def test_an_engine_that_hangs_in_its_unload_is_terminated_first():
    async with Keeper(hang_in_unload=True) as keeper:
        engine = await keeper.start()
        keeper.replica.ask_stop(0.0, 1.0)
        async with asyncio.timeout(20):
            await keeper.replica.wait_stopped()
        assert engine.status is not None
        assert engine.status.signal_name == "SIGTERM"


@looped
async def test_an_owner_that_is_cancelled_kills_its_engine():
    async with Keeper() as keeper:
        engine = await keeper.start()
        assert keeper.owner is not None
        keeper.owner.cancel()
        await eventually(lambda: engine.status, "the engine is reaped")
        assert engine.status.signal_name == "SIGKILL"
        assert not exists(engine.process.pid)
        engine.bury("its owner is gone")


@looped
async def test_a_supervisor_starts_and_stops_all_replicas_and_counts_their_states():
    keepers = [Keeper(), Keeper(unload_time=0.05)]
    keepers[1].replica.model, keepers[1].replica.name = "n", "n/0"
    supervisor = Supervisor(keeper.replica for keeper in keepers)
    assert supervisor.count_states() == {("m", "stopped"): 1, ("n", "stopped"): 1}
    running = asyncio.create_task(supervisor.run())
    for replica in supervisor:
        replica.ask_start()
    for keeper in keepers:
        await keeper.until_ready()
    assert supervisor.count_states() == {("m", "ready"): 1, ("n", "ready"): 1}
    assert [replica.model for replica in supervisor] == ["m", "n"]
    assert supervisor.of("n") == [keepers[1].replica]
    pids = [statistics.pid for statistics in supervisor.statistics()]
    await supervisor.stop_all(0.0, 10.0)
    assert not any(map(exists, pids))
    running.cancel()
    await asyncio.wait({running})


@looped
async def test_an_owners_bug_ends_the_supervisor(monkeypatch):
    async def fall(self: Replica) -> None:
        raise AssertionError("a bug")

    keeper = Keeper()
    monkeypatch.setattr(Replica, "_while_stopped", fall)
    with pytest.RaisesGroup(AssertionError) if hasattr(pytest, "RaisesGroup") else pytest.raises(ExceptionGroup):
        await Supervisor([keeper.replica]).run()
