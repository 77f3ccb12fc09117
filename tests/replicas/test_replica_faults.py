"""A replica whose engine dies, hangs, talks nonsense or never becomes ready."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time

import psutil
import pytest

from slimproc.errors import EngineCrashed, InternalError, RingCorrupt
from slimproc.ipc import wire
from slimproc.replicas import process as process_module
from slimproc.replicas.incarnation import Incarnation
from slimproc.replicas.process import EngineProcess
from slimproc.replicas.restart import RestartPolicy
from slimproc.replicas.states import ReplicaEvent, ReplicaState
from tests.fakes import RecordingStream, eventually, looped, turns
from tests.replicas.harness import Keeper, exists, script

S = ReplicaState
ENDLESS = script(tokens=["a"], repeat=1_000_000, token_latency=0.005)


# --- death ------------------------------------------------------------------------------------------------------------


@looped
async def test_killing_an_engine_fails_its_streams_once_and_the_next_engine_serves():
    async with Keeper() as keeper:
        first = await keeper.start()
        streams = [keeper.generate(ENDLESS, None) for _ in range(2)]
        await eventually(lambda: all(stream.completion_tokens > 3 for stream in streams), "both run")
        os.kill(first.process.pid, signal.SIGKILL)
        second = await keeper.until_ready(after=first)
        for stream in streams:
            assert isinstance(stream.error, EngineCrashed)
            assert "SIGKILL" in stream.error.message
            assert stream.ends == 1
            assert stream.text == "a" * stream.completion_tokens
        assert keeper.states == [S.STOPPED, S.STARTING, S.READY, S.BACKOFF, S.STARTING, S.READY]
        assert not exists(first.process.pid)
        assert second.process.epoch != first.process.epoch
        stream = keeper.generate()
        await eventually(lambda: stream.ended, "the next one serves")
        assert stream.error is None
        statistics = keeper.replica.statistics()
        assert statistics.restarts == 1
        assert statistics.tokens == sum(stream.completion_tokens for stream in (*streams, stream))
        assert keeper.metrics.engine_restarts["exited"] == 1


@looped
async def test_tokens_that_were_published_before_a_death_are_delivered_before_the_failure():
    """The script's last act is to die at its fifth token: four are in the ring."""
    async with Keeper() as keeper:
        await keeper.start()
        stream = keeper.generate(script(tokens=["a", "b", "c", "d", "e"], die_at=5), None)
        await eventually(lambda: stream.ended, "it fails")
        assert stream.text == "abcd"
        assert isinstance(stream.error, EngineCrashed)
        assert stream.ends == 1


@looped
async def test_an_end_that_was_published_before_a_death_counts():
    """The front is busy while one sequence ends and the other one kills the engine: it finds both in the ring."""
    async with Keeper() as keeper:
        engine = await keeper.start()
        done = keeper.generate(script(tokens=["a", "b"]), None)
        lost = keeper.generate(script(tokens=["a", "b", "c", "d"], die_at=4, token_latency=0.01), None)
        deadline = time.monotonic() + 20
        while psutil.Process(engine.process.pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
        assert not done.ended
        assert not lost.ended
        await eventually(lambda: lost.ended, "the news arrive")
        assert (done.text, done.error) == ("ab", None)
        assert lost.text == "abc"
        assert isinstance(lost.error, EngineCrashed)


@looped
async def test_a_death_while_idle_is_noticed_without_a_request():
    async with Keeper() as keeper:
        first = await keeper.start()
        os.kill(first.process.pid, signal.SIGSEGV)
        await keeper.until_ready(after=first)
        assert first.status is not None
        assert first.status.signal_name == "SIGSEGV"


@looped
async def test_a_slot_taken_just_before_a_death_ends_with_a_crash_like_any_other():
    async with Keeper() as keeper:
        engine = await keeper.start()
        slot, later, unused = engine.take_slot(), RecordingStream(), None
        os.kill(engine.process.pid, signal.SIGKILL)
        await eventually(lambda: engine.dead, "it is dead")
        assert engine.free_slots == 0
        slot.start(later, lambda rid: unused)
        assert not later.ended, "never in the caller's own turn"
        await eventually(lambda: later.ended, "it ends")
        assert isinstance(later.error, EngineCrashed)


@looped
async def test_a_question_to_an_engine_that_dies_is_answered_with_an_error():
    async with Keeper() as keeper:
        engine = await keeper.start()
        os.kill(engine.process.pid, signal.SIGSTOP)
        asking = asyncio.ensure_future(
            engine.ask(lambda number: wire.Tokenize(number, "x", add_special=False, parse_special=False))
        )
        await turns()
        os.kill(engine.process.pid, signal.SIGKILL)
        with pytest.raises(Exception, match="the engine died"):
            await asking
        with pytest.raises(EngineCrashed):
            await engine.ask(lambda number: wire.Detokenize(number, [1]))


@looped
async def test_an_exit_whose_status_somebody_else_took_is_noticed():
    """An ignored SIGCHLD makes the kernel throw the status away; here a thief does."""
    async with Keeper() as keeper:
        engine = await keeper.start()
        pid = engine.process.pid
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)  # noqa: ASYNC222  # before the loop can
        await keeper.until_ready(after=engine)
        assert engine.status is not None
        assert engine.status.code == 255


@looped
async def test_without_a_pidfd_a_thread_waits_for_the_exit(monkeypatch):
    def refuse(pid: int) -> int:
        raise PermissionError("a sandbox")

    monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)
    async with Keeper() as keeper:
        engine = await keeper.start()
        os.kill(engine.process.pid, signal.SIGKILL)
        await keeper.until_ready(after=engine)
        assert engine.status is not None
        assert engine.status.signal_name == "SIGKILL"


@looped
async def test_thirty_restarts_leave_nothing_behind():
    """Six of them serve and die in mid-stream, the others die while they load."""
    async with Keeper() as keeper:
        me = psutil.Process()
        engine = await keeper.start()
        for serving in [True] * 2 + [False] * 3:
            engine = await _one_death(keeper, engine, serving=serving)
        gc.collect()
        before = (me.num_fds(), threading.active_count(), len(me.children(recursive=True)))
        memory = me.memory_info().rss
        for serving in ([True] + [False] * 4) * 5:
            engine = await _one_death(keeper, engine, serving=serving)
        gc.collect()
        assert (me.num_fds(), threading.active_count(), len(me.children(recursive=True))) == before
        assert me.memory_info().rss - memory < 8 << 20
        assert keeper.replica.statistics().restarts >= 30
        assert sum(1 for made in gc.get_objects() if isinstance(made, Incarnation)) <= 2


async def _one_death(keeper: Keeper, engine: Incarnation, *, serving: bool) -> Incarnation:
    """Kill the engine, in mid-stream or while it loads; the engine that comes next (ready if this one was to serve)."""
    if serving:
        engine = await keeper.until_ready()
        stream = keeper.generate(ENDLESS, None)
        await eventually(lambda: stream.completion_tokens, "it streams")
    os.kill(engine.process.pid, signal.SIGKILL)
    await eventually(lambda: keeper.replica.engine not in (None, engine), "another engine")
    assert keeper.replica.engine is not None
    return keeper.replica.engine


# --- hanging ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["stopped by a signal", "hangs in a step"])
@looped
async def test_an_engine_that_makes_no_step_is_killed_as_stalled(how):
    async with Keeper(stall_timeout=0.4) as keeper:
        first = await keeper.start()
        stream = keeper.generate(script(tokens=["a"] * 9, token_latency=0.01, hang_at=3), None)
        if how == "stopped by a signal":
            os.kill(first.process.pid, signal.SIGSTOP)
        await keeper.until_ready(after=first)
        assert isinstance(stream.error, EngineCrashed)
        assert "made no step in 0.4 s with 1 sequences" in stream.error.message
        assert keeper.states[2:5] == [S.READY, S.KILLING, S.BACKOFF]
        assert keeper.metrics.engine_restarts["stalled"] == 1


@looped
async def test_a_slow_engine_that_makes_steps_is_not_stalled():
    """Steps count, and a backend that waits for its time steps once a second."""
    async with Keeper(stall_timeout=1.5, ttft=1.7) as keeper:
        engine = await keeper.start()
        stream = keeper.generate()
        await eventually(lambda: stream.ended, "it ends")
        assert stream.error is None
        assert keeper.replica.serving is engine


@looped
async def test_an_idle_engine_is_never_stalled_also_not_after_a_refusal():
    async with Keeper(stall_timeout=0.2) as keeper:
        engine = await keeper.start()
        for prompt in ("!fake {", script(tokens=["a"], error_at=1), "hello"):
            stream = keeper.generate(prompt)
            await eventually(lambda: stream.ended, "it ends")  # noqa: B023
            assert not engine._stall_watch.watching
        assert keeper.replica.serving is engine


@looped
async def test_an_engine_that_does_not_stop_a_cancelled_sequence_is_killed():
    async with Keeper(cancel_grace=0.2) as keeper:
        first = await keeper.start()
        stream, slot = keeper.begin(script(tokens=["a"], hang_at=1), None)
        await eventually(lambda: first.process.reader.black_box().rids, "it is in the step that hangs")
        slot.cancel()
        await keeper.until_ready(after=first)
        assert isinstance(stream.error, EngineCrashed)
        assert "did not stop a cancelled sequence" in stream.error.message


# --- nonsense ---------------------------------------------------------------------------------------------------------


def credit_garbage(engine: Incarnation) -> None:
    """Announce bytes that no writer wrote: the region still has zeros there."""
    os.eventfd_write(engine.process.reader.fd, 4096)


@looped
async def test_an_engine_whose_ring_is_corrupt_is_killed():
    async with Keeper(credit="eventfd") as keeper:
        first = await keeper.start()
        stream = keeper.generate(script(tokens=["a"], hang_at=1), None)
        credit_garbage(first)
        await keeper.until_ready(after=first)
        assert isinstance(stream.error, EngineCrashed)
        assert keeper.states[2:5] == [S.READY, S.KILLING, S.BACKOFF]
        assert keeper.metrics.engine_restarts["corrupt"] == 1
        assert first.status is not None
        assert first.status.signal_name == "SIGKILL"


@looped
async def test_corruption_while_it_loads_kills_the_engine():
    async with Keeper(credit="eventfd", load_time=20) as keeper:
        keeper.replica.ask_start()
        await eventually(lambda: keeper.replica.engine, "it loads")
        assert keeper.replica.engine is not None
        credit_garbage(keeper.replica.engine)
        await eventually(lambda: S.BACKOFF in keeper.states, "it is killed")
        assert keeper.states[:4] == [S.STOPPED, S.STARTING, S.KILLING, S.BACKOFF]
        assert keeper.replica.load_failed


@looped
async def test_corruption_while_it_drains_ends_the_drain():
    async with Keeper(credit="eventfd") as keeper:
        engine = await keeper.start()
        keeper.generate(ENDLESS, None)
        keeper.replica.ask_stop(3600.0, 0.2)
        await keeper.until(S.DRAINING)
        credit_garbage(engine)
        await keeper.until(S.STOPPED)
        assert keeper.states[-3:] == [S.DRAINING, S.STOPPING, S.STOPPED]


@looped
async def test_a_second_ready_is_nonsense_and_costs_one_engine():
    async with Keeper() as keeper:
        first = await keeper.start()
        with pytest.raises(RingCorrupt) as corrupt:
            first.on_report(wire.Ready(first.process.epoch, first.model, 0.0))
        first.on_corrupt(corrupt.value)  # as its link does
        await keeper.until_ready(after=first)
        assert keeper.metrics.engine_restarts["corrupt"] == 1


class BadStream(RecordingStream):
    taken = 0

    def take(self, item, at_ns, gathering) -> None:
        self.taken += 1
        raise ValueError("cannot encode")


@pytest.mark.parametrize("tokens", [1, 100], ids=["at its end", "in the middle"])
@looped
async def test_a_stream_that_cannot_take_its_token_costs_neither_a_slot_nor_the_others(tokens):
    async with Keeper() as keeper:
        engine = await keeper.start()
        good = keeper.generate(script(tokens=["a"] * 50, token_latency=0.005), None)
        bad = BadStream()
        engine.take_slot().start(
            bad, lambda rid: wire.Submit(rid=rid, prompt=script(tokens=["b"] * tokens, token_latency=0.005))
        )
        await eventually(lambda: engine.free_slots == 2, "both slots are free")
        assert isinstance(bad.error, InternalError)
        assert (bad.ends, bad.taken) == (1, 1), "it is asked no second time"
        await eventually(lambda: good.ended, "the other one ends")
        assert good.text == "a" * 50


# --- never ready ------------------------------------------------------------------------------------------------------


@looped
async def test_a_load_that_never_ends_is_killed():
    async with Keeper(load_time=3600, load_timeout=0.3) as keeper:
        keeper.replica.ask_start()
        await eventually(lambda: S.BACKOFF in keeper.states, "it is killed")
        assert keeper.states[:4] == [S.STOPPED, S.STARTING, S.KILLING, S.BACKOFF]
        assert keeper.replica.load_failed
        assert "did not load within 0.3 s" in keeper.replica.reason
        assert keeper.metrics.loads == {"ok": 0, "failed": 1}
        assert keeper.metrics.engine_restarts["load_timeout"] == 1


@looped
async def test_a_model_that_always_fails_to_load_is_given_up_with_its_reason():
    async with Keeper(load_error="out of memory", policy=RestartPolicy(first_wait=0.0, limit=3)) as keeper:
        keeper.replica.ask_start()
        await keeper.until(S.FAILED)
        assert keeper.states == [S.STOPPED] + [S.STARTING, S.BACKOFF] * 3 + [S.FAILED]
        assert keeper.replica.reason == "out of memory"
        assert keeper.metrics.loads["failed"] == 3
        keeper.replica.ask_start()
        await eventually(lambda: keeper.states.count(S.FAILED) == 2, "one more try")
        assert keeper.states[-3:] == [S.STARTING, S.BACKOFF, S.FAILED]


@looped
async def test_a_load_that_succeeds_ends_the_row_of_those_that_failed():
    policy = RestartPolicy(first_wait=0.0, limit=3, window=0.0)
    async with Keeper(policy=policy) as keeper:
        policy.failed(time.monotonic(), loading=True)
        policy.failed(time.monotonic(), loading=True)
        await keeper.start()
        assert policy.failed(time.monotonic(), loading=True) is not None


@looped
async def test_a_request_that_another_replica_served_forgives_nothing_while_this_one_loads():
    """Else a replica that never becomes ready would never be given up beside one that works."""
    policy = RestartPolicy(first_wait=0.0, limit=1000, healthy_after=0.0)
    async with Keeper(load_time=20, policy=policy) as keeper:
        policy.failed(time.monotonic())
        keeper.replica.ask_start()
        await eventually(lambda: keeper.replica.engine, "it loads")
        keeper.replica.served()
        assert policy.failures == 1


@looped
async def test_a_request_served_here_forgives_what_was():
    policy = RestartPolicy(first_wait=0.0, limit=1000, healthy_after=0.0)
    async with Keeper(policy=policy) as keeper:
        policy.failed(time.monotonic())
        await keeper.start()
        keeper.replica.served()
        assert policy.failures == 0


@looped
async def test_an_engine_that_dies_in_its_load_says_how():
    policy = RestartPolicy(first_wait=0.0, limit=2)
    async with Keeper(die_in_load=int(signal.SIGABRT), policy=policy) as keeper:
        keeper.replica.ask_start()
        await keeper.until(S.FAILED)
        assert "ended by SIGABRT" in keeper.replica.reason
        await keeper.stop()
        assert keeper.states[-2:] == [S.FAILED, S.STOPPED]


@looped
async def test_a_permanent_refusal_is_not_tried_again_until_an_operator_asks():
    async with Keeper(backend="no such backend") as keeper:
        keeper.replica.ask_start()
        await keeper.until(S.FAILED)
        assert keeper.states == [S.STOPPED, S.STARTING, S.BACKOFF, S.FAILED]
        assert "no such backend" in keeper.replica.reason
        keeper.replica.ask_start(forgive=True)
        await eventually(lambda: keeper.states.count(S.FAILED) == 2, "it was tried again")


@looped
async def test_a_replica_is_stopped_while_it_backs_off():
    async with Keeper(load_error="no", policy=RestartPolicy(first_wait=3600.0, longest_wait=3600.0)) as keeper:
        keeper.replica.ask_start()
        await eventually(lambda: keeper.states.count(S.BACKOFF) == 2, "it waits for an hour")
        await keeper.stop()
        assert keeper.states[-2:] == [S.BACKOFF, S.STOPPED]


@looped
async def test_an_engine_that_cannot_be_spawned_is_a_failed_load_and_leaves_nothing_open(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(12, "no memory")

    async with Keeper(policy=RestartPolicy(first_wait=0.0, limit=2)) as keeper:
        before = psutil.Process().num_fds()
        monkeypatch.setattr(os, "posix_spawn", refuse)
        keeper.replica.ask_start()
        await keeper.until(S.FAILED)
        assert "could not be started" in keeper.replica.reason
        assert psutil.Process().num_fds() == before


@pytest.mark.parametrize("step", ["create_region", "create_credit", "RingReader"])
@looped
async def test_a_spawn_that_fails_half_way_leaves_nothing_open(step, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(24, "too many open files")

    before = psutil.Process().num_fds()
    monkeypatch.setattr(process_module, step, refuse)
    with pytest.raises(OSError, match="too many"):
        EngineProcess(name="m/0", replica=0, ring_size=1 << 16, credit="pipe", environ={})
    gc.collect()
    assert psutil.Process().num_fds() == before


# --- stale news -------------------------------------------------------------------------------------------------------


@looped
async def test_news_of_an_engine_that_is_gone_are_dropped():
    async with Keeper() as keeper:
        first = await keeper.start()
        os.kill(first.process.pid, signal.SIGKILL)
        second = await keeper.until_ready(after=first)
        for event in ReplicaEvent:
            keeper.replica._post(event, first, "stale")
        stream = keeper.generate()
        await eventually(lambda: stream.ended, "it serves")
        assert keeper.replica.serving is second
        assert keeper.replica.reason == ""


@looped
async def test_what_an_engine_says_on_its_way_out_is_not_heard():
    async with Keeper(unload_time=0.2) as keeper:
        engine = await keeper.start()
        keeper.replica.ask_stop(0.0)
        await keeper.until(S.STOPPING)
        for event in (ReplicaEvent.READY_RECEIVED, ReplicaEvent.CORRUPT, ReplicaEvent.STALLED):
            keeper.replica._post(event, engine, "too late")
        await keeper.until(S.STOPPED)
        assert keeper.states[-2:] == [S.STOPPING, S.STOPPED]


@looped
async def test_ready_after_the_load_timed_out_is_too_late():
    async with Keeper(load_time=3600, load_timeout=0.2) as keeper:
        keeper.replica.ask_start()
        await keeper.until(S.KILLING)
        keeper.replica._post(ReplicaEvent.READY_RECEIVED, keeper.replica.engine, "")
        await eventually(lambda: S.BACKOFF in keeper.states, "it is killed all the same")
        assert S.READY not in keeper.states


@looped
async def test_a_stop_while_an_engine_is_killed_ends_in_stopped():
    async with Keeper() as keeper:
        engine = await keeper.start()
        engine.on_corrupt(RingCorrupt("nonsense"))
        keeper.replica.ask_stop(0.0)
        await keeper.until(S.STOPPED)
        assert keeper.states == [S.STOPPED, S.STARTING, S.READY, S.KILLING, S.STOPPING, S.STOPPED]


@looped
async def test_news_of_a_sequence_that_has_ended_change_nothing():
    async with Keeper() as keeper:
        engine = await keeper.start()
        engine.on_step(wire.Step(1, [wire.Tok(4711, "for nobody")]), None)
        engine.on_event(wire.Failed(4711, "engine_error", "for nobody"))
        assert (engine.free_slots, engine.tokens) == (2, 0)


@pytest.mark.parametrize("day", [-86400.0, 86400.0])
@looped
async def test_the_wall_clock_may_jump_by_a_day(day, monkeypatch):
    real = time.time
    async with Keeper(load_error="no", policy=RestartPolicy(first_wait=3600.0, longest_wait=3600.0)) as keeper:
        keeper.replica.ask_start()
        await eventually(lambda: keeper.states.count(S.BACKOFF) == 2, "it waits for an hour")
        monkeypatch.setattr(time, "time", lambda: real() + day)
        await turns(50)
        assert keeper.replica.state is S.BACKOFF
        assert 0 <= keeper.replica.statistics().since < 60
