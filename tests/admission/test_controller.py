"""The admission controller over fake replicas: who is admitted, who waits, who goes first, and what is counted."""

from __future__ import annotations

import asyncio
import time

import pytest

from slimproc.errors import InvalidRequest, ModelFailed, Overloaded, ServiceUnavailable, ShuttingDown
from slimproc.replicas.states import ReplicaState
from slimproc.request import GrammarSpec
from tests.fakes import FakeReplica, looped, request, turns

S = ReplicaState


@looped
async def test_a_request_with_a_free_slot_is_started_at_once(open_desk):
    desk = open_desk()
    engine = desk.replica.become_ready()
    generation = desk.submit(max_tokens=7, stop=("x",), echo=True)
    (submit,) = engine.submits.values()
    assert (submit.prompt, submit.max_tokens, submit.stop, submit.echo, submit.chat) == (
        "hello",
        7,
        ("x",),
        True,
        False,
    )
    assert desk.controller.in_flight() == {"m": 1}
    engine.finish(1)
    assert await generation.wait_finished()
    assert generation.outcome == "ok"
    generation.close()
    assert desk.outcomes() == {"ok": 1}
    assert desk.replica.well_served == 1
    assert desk.controller.in_flight() == {"m": 0}


@looped
async def test_requests_are_served_in_the_order_in_which_they_came(open_desk):
    desk = open_desk()
    engine = desk.replica.become_ready()
    generations = [desk.submit(prompts=[f"p{place}"]) for place in range(5)]
    for rid in range(1, 6):
        assert [submit.prompt for submit in engine.submits.values()] == [f"p{place}" for place in range(rid)]
        engine.finish(rid)
    for generation in generations:
        await generation.wait_finished()
        generation.close()


@looped
async def test_exactly_five_of_ten_are_admitted_with_one_slot_and_a_queue_of_four(open_desk):
    desk = open_desk(max_queue=4)
    engine = desk.replica.become_ready()
    admitted, refused = [], []
    for place in range(10):
        try:
            admitted.append(desk.submit(prompts=[f"p{place}"]))
        except Overloaded as error:
            refused.append(error)
    assert (len(admitted), len(refused)) == (5, 5)
    assert all(1 <= error.retry_after <= 60 for error in refused)
    assert desk.controller.queue_depths() == {"m": 4}
    assert len(engine.submits) == 1
    for rid in range(1, 6):
        engine.finish(rid)
    assert [submit.prompt for submit in engine.submits.values()] == [f"p{place}" for place in range(5)]
    for generation in admitted:
        generation.close()
    assert desk.outcomes() == {"ok": 5, "overloaded": 5}
    assert engine.free_slots == 1


@looped
async def test_without_a_queue_a_request_is_served_now_or_refused(open_desk):
    desk = open_desk(max_queue=0)
    with pytest.raises(Overloaded):
        desk.submit()
    engine = desk.replica.become_ready()
    first = desk.submit()
    with pytest.raises(Overloaded):
        desk.submit()
    engine.finish(1)
    first.close()
    desk.submit().close()


@looped
async def test_the_queues_of_all_models_have_one_limit_together(open_desk):
    desk = open_desk(FakeReplica("a"), FakeReplica("b"), max_queue_total=3)
    waiting = [desk.submit(model=model) for model in ("a", "a", "b")]
    for model in ("a", "b"):
        with pytest.raises(Overloaded):
            desk.submit(model=model)
    waiting[0].close()
    desk.submit(model="b").close()
    for generation in waiting:
        generation.close()
    assert desk.controller.queue_depths() == {"a": 0, "b": 0}


@looped
async def test_a_busy_model_does_not_keep_another_from_its_slots(open_desk):
    desk = open_desk(FakeReplica("a"), FakeReplica("b"))
    desk.replicas[0].become_ready()
    idle = desk.replicas[1].become_ready()
    waiting = [desk.submit(model="a") for _ in range(3)]
    other = desk.submit(model="b")
    assert len(idle.submits) == 1
    for generation in (*waiting, other):
        generation.close()


@looped
async def test_the_replica_with_the_least_to_do_gets_the_next_request(open_desk):
    desk = open_desk(FakeReplica(slots=3), FakeReplica(index=1, slots=3))
    engines = [replica.become_ready() for replica in desk.replicas]
    generations = [desk.submit() for _ in range(4)]
    assert [engine.occupied for engine in engines] == [2, 2]
    engines[1].finish(1)
    engines[1].finish(2)
    generations += [desk.submit(), desk.submit()]
    assert [engine.occupied for engine in engines] == [2, 2]
    for generation in generations:
        generation.close()
    assert desk.replicas[0].well_served == 0
    assert desk.replicas[1].well_served == 2


@looped
async def test_who_waits_for_a_load_is_served_when_it_is_done(open_desk):
    desk = open_desk(FakeReplica(slots=2))
    generations = [desk.submit() for _ in range(3)]
    engine = desk.replica.become_ready()
    assert len(engine.submits) == 2
    assert desk.controller.queue_depths() == {"m": 1}
    for generation in generations:
        generation.close()


@looped
async def test_where_nobody_may_wait_for_a_load_a_request_is_refused(open_desk):
    desk = open_desk(refuse_while_loading=True)
    with pytest.raises(ServiceUnavailable, match="is loading"):
        desk.submit()
    assert desk.outcomes() == {"unavailable": 1}
    desk.replica.become_ready()
    desk.submit().close()


# --- loads that fail, engines that die --------------------------------------------------------------------------------


@looped
async def test_who_waits_is_told_at_once_when_a_load_fails_and_nobody_can_serve(open_desk):
    desk = open_desk()
    generations = [desk.submit() for _ in range(2)]
    desk.replica.become(S.BACKOFF, "no such file", load_failed=True)
    for generation in generations:
        with pytest.raises(ServiceUnavailable, match="could not be loaded: no such file"):
            await generation.wait_started(None)
        generation.close()
    assert desk.outcomes() == {"unavailable": 2}
    assert desk.controller.queue_depths() == {"m": 0}


@looped
async def test_who_waits_goes_on_waiting_when_another_replica_may_still_come(open_desk):
    desk = open_desk(FakeReplica(), FakeReplica(index=1))
    generation = desk.submit()
    desk.replicas[0].become(S.BACKOFF, "no", load_failed=True)
    assert not generation.outcome
    desk.replicas[1].become(S.FAILED, "no", load_failed=True)
    assert generation.outcome == "unavailable"
    generation.close()


@looped
async def test_who_waits_goes_on_waiting_after_a_crash(open_desk):
    desk = open_desk()
    first = desk.replica.become_ready()
    running, waiting = desk.submit(), desk.submit()
    first.say(1, "some")
    desk.replica.crash()
    assert running.outcome == "engine_crashed"
    assert not waiting.outcome
    desk.replica.become(S.STARTING, "it died")
    second = desk.replica.become_ready()
    second.finish(1)
    assert waiting.outcome == "ok"
    for generation in (running, waiting):
        generation.close()


@looped
async def test_a_model_that_has_failed_refuses_at_once_and_is_wanted_again_after_a_minute(open_desk):
    desk = open_desk()
    desk.replica.become(S.FAILED, "broken")
    with pytest.raises(ModelFailed, match="has failed: broken") as caught:
        desk.submit()
    assert caught.value.retry_after == 60
    assert desk.controller.demands() == []
    desk.replica.changed_at -= 60
    generation = desk.submit()
    assert [demand.model for demand in desk.controller.demands()] == ["m"]
    desk.replica.become(S.STARTING, "broken")
    desk.replica.become_ready().finish(1)
    await generation.wait_finished()
    generation.close()


@pytest.mark.parametrize("options", [{"max_queue": 0}, {"refuse_while_loading": True}], ids=str)
@looped
async def test_a_refused_request_makes_a_failed_model_wanted_all_the_same(open_desk, options):
    desk = open_desk(**options)
    desk.replica.become(S.FAILED, "broken")
    desk.replica.changed_at -= 60
    with pytest.raises((Overloaded, ServiceUnavailable)):
        desk.submit()
    assert [(demand.model, demand.waiting) for demand in desk.controller.demands()] == [("m", 0)]


@looped
async def test_only_the_replica_that_served_a_request_is_forgiven_for_it(open_desk):
    desk = open_desk(FakeReplica(), FakeReplica(index=1))
    engine = desk.replicas[1].become_ready()
    generation = desk.submit()
    engine.finish(1)
    generation.close()
    assert [replica.well_served for replica in desk.replicas] == [0, 1]


@looped
async def test_the_wall_clock_has_no_say_in_a_wait(open_desk, monkeypatch):
    desk = open_desk()
    generation = desk.submit(seconds=3600)
    real = time.time
    for day in (-86400, 86400):
        monkeypatch.setattr(time, "time", lambda day=day: real() + day)
        await turns()
        assert not generation.outcome
    desk.replica.become_ready().finish(1)
    generation.close()
    assert desk.metrics.model("m").queue_wait.sum < 60


# --- the way out ------------------------------------------------------------------------------------------------------


@looped
async def test_a_shutdown_refuses_newcomers_tells_who_waits_and_lets_run_what_runs(open_desk):
    desk = open_desk()
    engine = desk.replica.become_ready()
    running, waiting = desk.submit(), desk.submit()
    desk.controller.close()
    with pytest.raises(ShuttingDown):
        await waiting.wait_started(None)
    waiting.close()
    with pytest.raises(ShuttingDown):
        desk.submit()
    idle = asyncio.ensure_future(desk.controller.wait_idle(60))
    await turns()
    assert not idle.done()
    engine.finish(1)
    assert await idle
    running.close()
    assert desk.outcomes() == {"ok": 1, "shutdown": 1, "shutting_down": 1}
    assert desk.controller.queue_depths() == {"m": 0}


@looped
async def test_a_request_that_has_some_of_its_slots_may_finish_in_a_shutdown(open_desk):
    desk = open_desk()
    engine = desk.replica.become_ready()
    generation = desk.submit(n=2)
    desk.controller.close()
    assert not generation.outcome
    engine.finish(1)
    engine.finish(2)
    assert generation.outcome == "ok"
    generation.close()


@looped
async def test_what_runs_longer_than_the_shutdown_may_take_is_ended(open_desk):
    desk = open_desk()
    engine = desk.replica.become_ready()
    generation = desk.submit()
    desk.controller.close()
    assert not await desk.controller.wait_idle(0.01)
    desk.controller.abort()
    with pytest.raises(ShuttingDown):
        await generation.wait_finished()
    generation.close()
    assert engine.cancels == [1]
    assert desk.outcomes() == {"shutdown": 1}
    assert await desk.controller.wait_idle(0)


@looped
async def test_a_shutdown_wants_no_model(open_desk):
    desk = open_desk()
    desk.replica.become(S.FAILED, "broken")
    desk.replica.changed_at -= 60
    desk.controller.close()
    with pytest.raises(ShuttingDown):
        desk.submit()
    assert desk.controller.demands() == []


def retry_after_of_a_full_queue(desk) -> float:
    """One request has the slot, two wait, and the next one is refused."""
    waiting = [desk.submit() for _ in range(3)]
    with pytest.raises(Overloaded) as caught:
        desk.submit(request())
    for generation in waiting:
        generation.close()
    return caught.value.retry_after


@looped
async def test_retry_after_follows_how_fast_the_queue_drains(open_desk):
    """Thirty a second were served, so the queue of two ahead is gone within the second; with none served, who knows."""
    desk = open_desk(max_queue=2)
    engine = desk.replica.become_ready()
    for _ in range(30):
        generation = desk.submit()
        engine.finish(max(engine.submits))
        generation.close()
    assert retry_after_of_a_full_queue(desk) == 1


@looped
async def test_a_slot_is_not_taken_for_as_long_as_a_grammar_is_compiled(open_desk):
    """Others have it meanwhile. Half of them generate for ten seconds, after a hundred; the others are refused then."""
    desk = open_desk(max_queue=2)
    engine = desk.replica.become_ready()
    for place in range(8):
        generation = desk.submit(grammar=GrammarSpec("regex", "x", "guided_regex"))
        generation.times.granted -= 110
        rid = max(engine.submits)
        if place % 2:
            engine.fail(rid, InvalidRequest("no such grammar", param="guided_regex"))
        else:
            engine.say(rid)
            generation.times.first_text -= 9.9
            engine.finish(rid)
        generation.close()
    assert retry_after_of_a_full_queue(desk) == 30
