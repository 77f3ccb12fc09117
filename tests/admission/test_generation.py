"""One admitted request: its slots, its rendering, its deadline and its one end."""

from __future__ import annotations

import asyncio
import logging

import pytest

from slimproc.chat.templates import Rendered
from slimproc.errors import ContextLengthExceeded, DeadlineExceeded, EngineCrashed, EngineError, InvalidRequest
from slimproc.replicas.states import ReplicaState
from slimproc.request import ChatPrompt, SamplingParams
from tests.fakes import FakeReplica, eventually, looped, turns

CHAT = [ChatPrompt([{"role": "user", "content": "hi"}])]


class SlowRenderer:
    """Renders when it is told to."""

    def __init__(self) -> None:
        self.calls = 0
        self.cancelled = 0
        self.answer: asyncio.Future[Rendered] = asyncio.get_running_loop().create_future()

    async def __call__(self, model, info, chat) -> Rendered:
        self.calls += 1
        try:
            return await asyncio.shield(self.answer)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


# --- deadlines --------------------------------------------------------------------------------------------------------


@looped
async def test_a_deadline_in_the_queue_starts_nothing_and_frees_the_place(open_desk):
    desk = open_desk(max_queue=1)
    engine = desk.replica.become_ready()
    running, waiting = desk.submit(), desk.submit(seconds=0.02)
    with pytest.raises(DeadlineExceeded, match="waiting for a slot"):
        await waiting.wait_started(None)
    waiting.close()
    next_one = desk.submit()
    engine.finish(1)
    assert [submit.rid for submit in engine.submits.values()] == [1, 2]
    assert next_one.started
    for generation in (running, next_one):
        generation.close()
    assert desk.outcomes() == {"ok": 1, "timeout": 1, "cancelled": 1}


@looped
async def test_a_deadline_that_has_passed_on_arrival_never_reaches_an_engine(open_desk):
    desk = open_desk()
    engine = desk.replica.become_ready()
    generation = desk.submit(seconds=-1)
    with pytest.raises(DeadlineExceeded):
        await generation.wait_finished()
    generation.close()
    assert not engine.submits
    assert desk.outcomes() == {"timeout": 1}


@pytest.mark.parametrize(("said", "where"), [([], "in prefill"), (["a"], "generating")])
@looped
async def test_a_deadline_while_running_cancels_and_the_slot_is_free_when_the_engine_says_so(open_desk, said, where):
    desk = open_desk()
    engine = desk.replica.become_ready()
    generation, waiting = desk.submit(seconds=0.05), desk.submit()
    for text in said:
        engine.say(1, text)
    with pytest.raises(DeadlineExceeded, match=where):
        await generation.wait_finished()
    generation.close()
    assert engine.cancels == [1]
    assert not waiting.started
    engine.say(1, "late")
    engine.obey_cancels()
    assert waiting.started
    waiting.close()
    assert desk.outcomes() == {"timeout": 1, "cancelled": 1}


@looped
async def test_a_deadline_during_rendering_does_not_wait_for_the_renderer(open_desk):
    renderer = SlowRenderer()
    desk = open_desk(render=renderer)
    engine = desk.replica.become_ready()
    generation = desk.submit(prompts=CHAT, seconds=0.05)
    with pytest.raises(DeadlineExceeded):
        await generation.wait_started(None)
    generation.close()
    await turns()
    assert renderer.cancelled == 1
    assert not engine.submits
    assert engine.free_slots == 1


@looped
async def test_a_wait_with_a_limit_ends_without_an_end(open_desk):
    desk = open_desk()
    engine = desk.replica.become_ready()
    generation = desk.submit()
    assert not await generation.wait_started(0.0)
    engine.say(1)
    assert await generation.wait_started(0.0)
    assert not await generation.wait_finished(0.0)
    engine.finish(1)
    assert await generation.wait_finished(0.0)
    generation.close()


# --- the client goes away ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["queued", "loading", "rendering", "running", "finished"])
@looped
async def test_a_handler_that_is_cancelled_frees_everything_wherever_it_waits(open_desk, where):
    renderer = SlowRenderer()
    desk = open_desk(render=renderer)
    engine = desk.replica.become_ready() if where != "loading" else None
    other = desk.submit() if where == "queued" else None
    generation = desk.submit(prompts=CHAT if where == "rendering" else None)

    async def handler() -> None:
        try:
            await generation.wait_finished()
            await asyncio.sleep(60)
        finally:
            generation.close()

    task = asyncio.ensure_future(handler())
    await turns()
    if where == "finished":
        assert engine is not None
        engine.finish(1)
        await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await turns()
    assert desk.outcomes() == ({"ok": 1} if where == "finished" else {"cancelled": 1})
    if other is not None:
        other.close()
    assert desk.controller.queue_depths() == {"m": 0}
    if engine is not None:
        engine.obey_cancels()
        assert engine.free_slots == 1
        assert len(engine.submits) == (0 if where == "rendering" else 1)
    assert await desk.controller.wait_idle(0)


# --- chats ------------------------------------------------------------------------------------------------------------


@looped
async def test_a_chat_is_rendered_once_it_has_a_slot_and_then_started(open_desk):
    desk = open_desk(FakeReplica(slots=2))
    generation = desk.submit(prompts=CHAT, n=3)
    await turns()
    assert desk.rendered == 0
    engine = desk.replica.become_ready()
    await eventually(lambda: len(engine.submits) == 2, "both slots are used")
    engine.finish(1)
    assert len(engine.submits) == 3
    assert all(
        (submit.prompt, submit.literals, submit.chat) == ("rendered", [(0, 3)], True)
        for submit in engine.submits.values()
    )
    assert desk.rendered == 1
    generation.close()


@looped
async def test_a_template_that_refuses_is_the_callers_fault_and_gives_the_slot_back(open_desk):
    async def refuse(model, info, chat) -> Rendered:
        raise InvalidRequest("roles must alternate", param="messages")

    desk = open_desk(render=refuse)
    engine = desk.replica.become_ready()
    generation = desk.submit(prompts=CHAT)
    with pytest.raises(InvalidRequest, match="alternate"):
        await generation.wait_started(None)
    generation.close()
    assert engine.free_slots == 1
    assert desk.outcomes() == {"invalid": 1}


@looped
async def test_an_engine_that_dies_during_the_rendering_is_replaced_by_the_next_one(open_desk):
    renderer = SlowRenderer()
    desk = open_desk(render=renderer)
    desk.replica.become_ready()
    generation = desk.submit(prompts=CHAT)
    await turns()
    desk.replica.crash()
    renderer.answer.set_result(Rendered("late", []))
    await turns()
    second = desk.replica.become_ready()
    await eventually(lambda: second.submits, "it is started again")
    second.finish(1)
    assert await generation.wait_finished()
    assert renderer.calls == 1
    generation.close()


@looped
async def test_a_bug_in_the_rendering_is_an_error_of_ours_and_not_a_hang(open_desk):
    async def fall(model, info, chat) -> Rendered:
        raise ZeroDivisionError

    desk = open_desk(render=fall)
    engine = desk.replica.become_ready()
    generation = desk.submit(prompts=CHAT)
    with pytest.raises(Exception, match="could not be rendered"):
        await generation.wait_started(None)
    generation.close()
    assert engine.free_slots == 1


# --- crashes ----------------------------------------------------------------------------------------------------------


@looped
async def test_a_request_that_had_no_byte_is_tried_once_more_in_its_old_place(open_desk):
    desk = open_desk(FakeReplica(slots=2))
    desk.replica.become_ready()
    generations = [desk.submit(prompts=[f"p{place}"]) for place in range(4)]
    desk.replica.crash()
    assert desk.controller.queue_depths() == {"m": 2}, "who has had a slot does not count"
    second = desk.replica.become_ready()
    assert [submit.prompt for submit in second.submits.values()] == ["p0", "p1"]
    for rid in range(1, 5):
        second.finish(rid)
    assert [submit.prompt for submit in second.submits.values()] == ["p0", "p1", "p2", "p3"]
    for generation in generations:
        await generation.wait_finished()
        generation.close()
    assert desk.outcomes() == {"ok": 4}


@looped
async def test_a_request_that_was_in_two_crashes_is_not_tried_a_third_time(open_desk):
    desk = open_desk()
    generation = desk.submit()
    for _ in range(2):
        desk.replica.become_ready()
        desk.replica.crash()
    with pytest.raises(EngineCrashed) as caught:
        await generation.wait_started(None)
    assert caught.value.retryable, "it was in no native call: the fault need not be its own"
    generation.close()
    assert desk.outcomes() == {"engine_crashed": 1}
    assert not desk.replica.become_ready().submits


@looped
async def test_a_request_that_had_a_byte_fails_with_its_engine(open_desk):
    desk = open_desk()
    engine = desk.replica.become_ready()
    generation = desk.submit()
    engine.say(1, "x")
    desk.replica.crash()
    with pytest.raises(EngineCrashed):
        await generation.wait_finished()
    generation.close()
    assert desk.outcomes() == {"engine_crashed": 1}


@looped
async def test_a_client_that_leaves_while_its_second_try_waits_leaves_nothing(open_desk):
    desk = open_desk()
    desk.replica.become_ready()
    generation = desk.submit()
    desk.replica.crash()
    generation.close()
    assert not desk.replica.become_ready().submits
    assert desk.outcomes() == {"cancelled": 1}


@looped
async def test_a_second_try_that_waits_for_a_load_that_fails_is_told(open_desk):
    desk = open_desk()
    desk.replica.become_ready()
    generation = desk.submit()
    desk.replica.crash()
    desk.replica.become(ReplicaState.BACKOFF, "no memory", load_failed=True)
    assert generation.outcome == "unavailable"
    generation.close()


# --- several sequences ------------------------------------------------------------------------------------------------


@looped
async def test_more_sequences_than_slots_run_in_turn_and_nobody_younger_gets_between(open_desk):
    desk = open_desk(FakeReplica(slots=2))
    engine = desk.replica.become_ready()
    big = desk.submit(prompts=["a", "b"], n=2, sampling=SamplingParams(seed=5))
    small = desk.submit(prompts=["later"])
    assert engine.occupied == 2
    for rid in range(1, 5):
        engine.finish(rid)
    assert big.outcome == "ok"
    assert small.started
    assert [(submit.prompt, submit.sampling.seed) for submit in engine.submits.values()] == [
        ("a", 5), ("a", 6), ("b", 5), ("b", 6), ("later", None),
    ]  # fmt: skip
    assert [stream.text for stream in big.streams] == ["end"] * 4
    for generation in (big, small):
        generation.close()
    assert desk.outcomes() == {"ok": 1, "cancelled": 1}


@looped
async def test_a_choice_that_fails_fails_the_request_and_cancels_the_others(open_desk):
    desk = open_desk(FakeReplica(slots=2))
    engine = desk.replica.become_ready()
    generation = desk.submit(n=3)
    engine.fail(1, EngineError("nothing came of it"))
    with pytest.raises(EngineError, match="nothing came"):
        await generation.wait_finished()
    generation.close()
    assert engine.cancels == [2]
    assert len(engine.submits) == 2
    engine.obey_cancels()
    assert engine.free_slots == 2
    assert desk.outcomes() == {"engine_error": 1}


@looped
async def test_a_crash_with_one_choice_begun_and_one_not_fails_the_whole_and_restarts_neither(open_desk):
    desk = open_desk(FakeReplica(slots=2))
    engine = desk.replica.become_ready()
    generation = desk.submit(n=2)
    engine.say(2, "begun")
    desk.replica.crash()
    assert generation.outcome == "engine_crashed"
    assert not desk.replica.become_ready().submits
    generation.close()


@pytest.mark.parametrize(
    ("ids", "error"), [([5000] * 3, InvalidRequest), ([1] * 4096, ContextLengthExceeded), ([-1], None), ([1, 2], None)]
)
@looped
async def test_token_ids_are_checked_against_the_model_before_the_first_of_a_list_begins(open_desk, ids, error):
    desk = open_desk(FakeReplica(slots=2))
    engine = desk.replica.become_ready()
    generation = desk.submit(prompts=[[1], ids])
    if error is None:
        assert len(engine.submits) == 2
    else:
        with pytest.raises(error):
            await generation.wait_started(None)
        assert not engine.submits
        assert engine.free_slots == 2
    generation.close()


# --- the record -------------------------------------------------------------------------------------------------------


@looped
async def test_what_the_engine_refuses_counts_as_a_refusal_and_not_as_a_failure(open_desk):
    desk = open_desk()
    engine = desk.replica.become_ready()
    generation = desk.submit()
    engine.fail(1, ContextLengthExceeded("too long", param="prompt"))
    generation.close()
    assert desk.outcomes() == {"invalid": 1}


@looped
async def test_the_record_is_written_once_with_its_times_in_order(open_desk, caplog):
    caplog.set_level(logging.INFO, logger="slimproc.generation")
    desk = open_desk()
    engine = desk.replica.become_ready()
    generation = desk.submit()
    engine.say(1, "a")
    engine.say(1, "b")
    engine.finish(1)
    generation.close()
    generation.close()
    times = generation.times
    assert times.arrived <= times.granted <= times.first_text <= times.last_text <= times.ended
    (record,) = caplog.records
    fields = record.fields
    assert fields["outcome"] == "ok"
    assert fields["completion_tokens"] == 3
    assert fields["finish_reason"] == "stop"
    numbers = desk.metrics.model("m")
    counts = [numbers.queue_wait, numbers.ttft, numbers.request_duration, numbers.decode_rate]
    assert [histogram.count for histogram in counts] == [1, 1, 1, 1]
    assert numbers.prompt_tokens == 3


def waits_of(caplog):
    """In milliseconds, for a load and in the queue, of each record."""
    return [(record.fields["load_wait_ms"], record.fields["queue_wait_ms"]) for record in caplog.records]


def age(generation, seconds):
    """Make it have come so long before."""
    generation.times.arrived -= seconds
    if generation.times.ready:
        generation.times.ready -= seconds


@looped
async def test_the_wait_for_a_load_is_told_apart_from_the_wait_for_a_slot(open_desk, caplog):
    caplog.set_level(logging.INFO, logger="slimproc.generation")
    desk = open_desk()
    first, second = desk.submit(), desk.submit()
    age(first, 3)
    age(second, 3)
    engine = desk.replica.become_ready()
    engine.ready_since -= 1  # since then the first has had the one slot
    second.close()
    third = desk.submit()
    engine.finish(1)
    engine.finish(2)
    (load, queue), (load_of_first, _), (load_of_third, _) = waits_of(caplog)
    assert 2000 <= load <= queue - 900
    assert load_of_first >= 3000
    assert load_of_third == 0, "its model was there when it came"
    first.close()
    third.close()


@looped
async def test_who_leaves_during_the_load_has_waited_for_nothing_else(open_desk, caplog):
    caplog.set_level(logging.INFO, logger="slimproc.generation")
    generation = open_desk().submit()
    age(generation, 3)
    generation.close()
    ((load, queue),) = waits_of(caplog)
    assert load == queue >= 3000


@looped
async def test_a_slot_of_a_replica_that_was_loaded_meanwhile_is_no_wait_for_a_load(open_desk, caplog):
    caplog.set_level(logging.INFO, logger="slimproc.generation")
    desk = open_desk(FakeReplica(), FakeReplica(index=1))
    desk.replicas[0].become_ready()
    first, second = desk.submit(), desk.submit()
    age(second, 3)
    desk.replicas[1].become_ready().finish(1)
    ((load, queue),) = waits_of(caplog)
    assert load == 0
    assert queue >= 3000
    first.close()
    second.close()


@looped
async def test_a_refused_request_has_no_duration_and_a_waiting_one_no_first_token(open_desk):
    desk = open_desk()
    desk.submit().close()
    numbers = desk.metrics.model("m")
    assert [histogram.count for histogram in (numbers.queue_wait, numbers.ttft, numbers.request_duration)] == [0, 0, 0]
