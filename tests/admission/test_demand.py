"""What residency hears of the queues, what it tells those who wait, and who goes first."""

from __future__ import annotations

import time

import pytest

from slimproc.admission.demand import ASKED_LASTS
from slimproc.errors import DrainTimeout, InsufficientMemory, Overloaded, QueueTimeout, ServiceUnavailable
from slimproc.replicas.states import ReplicaState
from slimproc.request import Deadline
from tests.fakes import FakeReplica, looped, turns

S = ReplicaState


def watch(desk) -> list[list[tuple[str, int]]]:
    """What was wanted each time that residency was told."""
    told: list[list[tuple[str, int]]] = []
    desk.controller.on_demand = lambda: told.append(wanted(desk))
    return told


def wanted(desk) -> list[tuple[str, int]]:
    return [(demand.model, demand.waiting) for demand in desk.controller.demands()]


@looped
async def test_a_model_that_is_not_there_is_wanted_while_somebody_waits(open_desk):
    desk = open_desk(FakeReplica("a"), FakeReplica("b"))
    for replica in desk.replicas:
        replica.become(S.STOPPED)
    told = watch(desk)
    before = time.monotonic()
    first, second = desk.submit(model="a"), desk.submit(model="a")
    (demand,) = desk.controller.demands()
    assert (demand.model, demand.waiting, demand.preload) == ("a", 2, False)
    assert before <= demand.since == first.arrived < second.arrived
    first.close()
    assert desk.controller.demands()[0].since == second.arrived
    second.close()
    assert wanted(desk) == []
    assert told == [[("a", 1)], [("a", 1)], []]


@looped
async def test_a_stopped_model_is_queued_for_and_not_refused(open_desk):
    desk = open_desk()
    desk.replica.become(S.STOPPED)
    generation = desk.submit()
    desk.replica.become(S.STARTING)
    desk.replica.become_ready().finish(1)
    assert generation.outcome == "ok"
    generation.close()


@looped
async def test_a_model_that_serves_at_once_is_never_told_of(open_desk):
    desk = open_desk()
    engine = desk.replica.become_ready()
    told = watch(desk)
    for _ in range(3):
        generation = desk.submit()
        engine.finish(max(engine.submits))
        generation.close()
    assert told == []


@looped
async def test_of_a_busy_model_only_the_beginning_and_the_end_of_a_queue_are_told(open_desk):
    desk = open_desk()
    engine = desk.replica.become_ready()
    told = watch(desk)
    generations = [desk.submit() for _ in range(4)]
    for rid in range(1, 5):
        engine.finish(rid)
    assert told == [[("m", 1)], []]
    for generation in generations:
        generation.close()


@pytest.mark.parametrize("options", [{"refuse_while_loading": True}, {"max_queue": 0}], ids=str)
@looped
async def test_who_is_refused_because_the_model_is_away_has_asked_for_it(open_desk, options, monkeypatch):
    desk = open_desk(**options)
    desk.replica.become(S.STOPPED)
    told = watch(desk)
    with pytest.raises((ServiceUnavailable, Overloaded)):
        desk.submit()
    assert told == [[("m", 0)]]
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + ASKED_LASTS)
    assert wanted(desk) == [], "nobody came back"
    monkeypatch.setattr(time, "monotonic", real)


@looped
async def test_what_was_asked_for_is_settled_by_a_load_and_by_its_failure(open_desk):
    desk = open_desk(refuse_while_loading=True)
    desk.replica.become(S.STOPPED)
    for how in ("ready", "failed", "refused"):
        with pytest.raises(ServiceUnavailable):
            desk.submit()
        assert wanted(desk) == [("m", 0)]
        if how == "ready":
            desk.replica.become_ready()
        elif how == "failed":
            desk.replica.become(S.BACKOFF, "no", load_failed=True)
        else:
            desk.controller.fail_waiting("m", InsufficientMemory("too big"))
        assert wanted(desk) == []
        desk.replica.become(S.STOPPED)


@looped
async def test_a_refusal_reaches_everybody_who_waits_and_nobody_else(open_desk):
    desk = open_desk(FakeReplica("a"), FakeReplica("b"))
    busy = desk.replicas[1].become_ready()
    running, other = desk.submit(model="b"), desk.submit(model="b")
    waiting = [desk.submit(model="a") for _ in range(2)]
    desk.controller.fail_waiting("a", InsufficientMemory("too big", plan={"needed": 7}))
    errors = []
    for generation in waiting:
        with pytest.raises(InsufficientMemory) as caught:
            await generation.wait_started(None)
        errors.append(caught.value)
        generation.close()
    assert [(error.message, error.plan, error.retry_after) for error in errors] == [("too big", {"needed": 7}, 5.0)] * 2
    assert errors[0] is not errors[1]
    assert not running.outcome
    assert not other.outcome
    assert desk.outcomes("a") == {"unavailable": 2}
    busy.finish(1)
    for generation in (running, other):
        generation.close()


@looped
async def test_a_drain_that_took_too_long_is_told_to_those_who_waited_for_it_alone(open_desk):
    desk = open_desk()
    early = desk.submit()
    began = time.monotonic()
    late = desk.submit()
    desk.controller.fail_waiting("m", DrainTimeout("busy"), began)
    with pytest.raises(DrainTimeout):
        await early.wait_started(None)
    assert not late.outcome
    early.close()
    late.close()
    assert desk.outcomes() == {"timeout": 1, "cancelled": 1}


@looped
async def test_in_a_fair_order_who_cannot_delay_an_older_one_may_pass_it(open_desk):
    desk = open_desk(FakeReplica("a"), FakeReplica("b"))
    desk.replicas[1].become_ready()
    older, younger = desk.submit(model="a"), desk.submit(model="b")
    assert younger.started
    for generation in (older, younger):
        generation.close()


@looped
async def test_in_a_strict_order_nobody_passes_an_older_one(open_desk):
    desk = open_desk(FakeReplica("a"), FakeReplica("b", slots=4), strict=True)
    engine = desk.replicas[1].become_ready()
    first = desk.submit(model="b")
    older, younger, youngest = desk.submit(model="a"), desk.submit(model="b"), desk.submit(model="b")
    assert first.started
    assert not younger.started
    assert desk.controller.queue_depths() == {"a": 1, "b": 2}
    desk.replicas[0].become_ready()
    assert [generation.started for generation in (older, younger, youngest)] == [True, True, True]
    assert len(engine.submits) == 3
    for generation in (first, older, younger, youngest):
        generation.close()


@pytest.mark.parametrize("how", ["leaves", "expires", "is refused"])
@looped
async def test_in_a_strict_order_the_end_of_the_older_one_lets_the_younger_go(open_desk, how):
    desk = open_desk(FakeReplica("a"), FakeReplica("b"), strict=True)
    desk.replicas[1].become_ready()
    older, younger = desk.submit(model="a"), desk.submit(model="b")
    assert not younger.started
    if how == "leaves":
        older.close()
    elif how == "expires":
        older.expire()
    else:
        desk.controller.fail_waiting("a", InsufficientMemory("too big"))
    assert younger.started
    for generation in (older, younger):
        generation.close()


@looped
async def test_in_a_strict_order_waiting_for_others_counts_as_waiting(open_desk):
    desk = open_desk(FakeReplica("a"), FakeReplica("b"), strict=True, max_queue_total=1)
    desk.replicas[1].become_ready()
    older = desk.submit(model="a")
    with pytest.raises(Overloaded):
        desk.submit(model="b")
    older.close()
    desk.submit(model="b").close()


@looped
async def test_hundreds_that_expire_at_once_end_one_after_the_other(open_desk):
    """Each end lets the next be looked at: as a loop, not as a tower of calls."""
    desk = open_desk(FakeReplica("a"), FakeReplica("b"), max_queue=1000, max_queue_total=2000, strict=True)
    past = Deadline.after(0.05, time.monotonic())
    blocker = desk.submit(model="b")
    generations = [desk.submit(model="a", deadline=past) for _ in range(600)]
    while past.remaining(time.monotonic()) > 0:
        pass
    blocker.close()
    assert {generation.outcome for generation in generations} == {"timeout"}
    with pytest.raises(QueueTimeout):
        await generations[0].wait_started(None)
    for generation in generations:
        generation.close()
    await turns()
