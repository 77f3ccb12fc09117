"""Admission's decisions, as tables and as properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimproc.admission.policy import (
    QueueView,
    ReplicaView,
    Verdict,
    choose,
    decide,
    expected_wait,
    hopeless,
    may_retry,
    retry_after,
)
from slimproc.admission.rate import SlotTime
from slimproc.replicas.restart import RETRY_AFTER
from slimproc.replicas.states import ReplicaState

S = ReplicaState


def queue(waiting: int = 0, limit: int = 4, in_all: int | None = None, limit_in_all: int = 256) -> QueueView:
    return QueueView(waiting, limit, waiting if in_all is None else in_all, limit_in_all)


def replica(state: ReplicaState = S.READY, free: int = 1, occupied: int = 0, **fields) -> ReplicaView:
    return ReplicaView(
        state=state,
        free_slots=free if state is S.READY else 0,
        occupied=occupied,
        load_failed=fields.get("load_failed", False),
        seconds_in_state=fields.get("seconds", 0.0),
        renewed=fields.get("renewed", False),
    )


BUSY = replica(free=0, occupied=1)
LOADING = replica(S.STARTING)
FAILED = replica(S.FAILED)
OLD_FAILURE = replica(S.FAILED, seconds=RETRY_AFTER)


@pytest.mark.parametrize(
    ("waiting", "replicas", "verdict"),
    [
        (queue(), [replica()], Verdict.START),
        (queue(limit=0), [replica()], Verdict.START),
        (queue(), [BUSY], Verdict.QUEUE),
        (queue(), [BUSY, replica()], Verdict.START),
        (queue(3), [BUSY], Verdict.QUEUE),
        (queue(4), [BUSY], Verdict.REFUSE_FULL),
        (queue(limit=0), [BUSY], Verdict.REFUSE_FULL),
        (queue(1, in_all=256), [BUSY], Verdict.REFUSE_FULL),
        (queue(1, in_all=255), [BUSY], Verdict.QUEUE),
        (queue(1), [replica()], Verdict.QUEUE),  # nobody overtakes
        (queue(), [LOADING], Verdict.QUEUE),
        (queue(limit=0), [LOADING], Verdict.REFUSE_FULL),
        (queue(), [FAILED], Verdict.REFUSE_FAILED),
        (queue(), [FAILED, FAILED], Verdict.REFUSE_FAILED),
        (queue(), [FAILED, OLD_FAILURE], Verdict.QUEUE),
        (queue(), [FAILED, LOADING], Verdict.QUEUE),
        (queue(), [FAILED, replica()], Verdict.START),
        (queue(), [replica(S.BACKOFF, load_failed=True)], Verdict.REFUSE_FAILED),
        (queue(), [replica(S.BACKOFF, load_failed=True), OLD_FAILURE], Verdict.QUEUE),
        (queue(), [replica(S.BACKOFF)], Verdict.QUEUE),  # it served, and comes back
        (queue(), [replica(S.DRAINING)], Verdict.QUEUE),
    ],
)
def test_what_becomes_of_a_request(waiting, replicas, verdict):
    assert decide(waiting, replicas, refuse_while_loading=False) is verdict


@pytest.mark.parametrize(
    ("replicas", "verdict"),
    [
        ([LOADING], Verdict.REFUSE_LOADING),
        ([replica(S.BACKOFF)], Verdict.REFUSE_LOADING),
        ([OLD_FAILURE], Verdict.REFUSE_LOADING),
        ([FAILED], Verdict.REFUSE_FAILED),
        ([LOADING, BUSY], Verdict.QUEUE),
        ([LOADING, replica()], Verdict.START),
    ],
)
def test_what_becomes_of_it_where_nobody_may_wait_for_a_load(replicas, verdict):
    assert decide(queue(), replicas, refuse_while_loading=True) is verdict


@pytest.mark.parametrize(
    ("replicas", "place"),
    [
        ([], None),
        ([BUSY], None),
        ([replica(occupied=2), replica(occupied=1), replica(occupied=3)], 1),
        ([replica(occupied=1), replica(occupied=1)], 0),
        ([replica(free=0, occupied=0), replica(occupied=9)], 1),
    ],
)
def test_the_least_occupied_replica_with_a_free_slot_is_chosen(replicas, place):
    assert choose(replicas) == place


@pytest.mark.parametrize(
    ("replicas", "answer"),
    [
        ([FAILED], True),
        ([replica(S.BACKOFF, load_failed=True)], True),
        ([replica(S.BACKOFF, load_failed=True), FAILED], True),
        ([replica(S.BACKOFF)], False),  # it served, and comes back
        ([FAILED, LOADING], False),
        ([FAILED, BUSY], False),
        ([replica(S.KILLING, load_failed=True)], False),
        ([replica(S.BACKOFF, load_failed=True), replica(S.STOPPED), FAILED], True),
        ([replica(S.BACKOFF), replica(S.STOPPED)], False),
        ([FAILED, replica(S.STOPPED)], False),  # the other one is tried now
    ],
)
def test_waiting_is_hopeless_once_every_load_has_failed_and_not_after_a_crash(replicas, answer):
    assert hopeless(replicas) is answer


def test_a_failed_replica_may_try_again_after_a_minute():
    assert not may_retry(replica(S.FAILED, seconds=59.9))
    assert may_retry(replica(S.FAILED, seconds=60.0))
    assert not may_retry(replica(S.BACKOFF, seconds=3600.0))


def test_a_failed_replica_whose_file_is_another_by_now_may_try_again_at_once():
    assert may_retry(replica(S.FAILED, renewed=True))
    assert decide(queue(), [replica(S.FAILED, renewed=True)], refuse_while_loading=False) is Verdict.QUEUE
    assert not may_retry(replica(S.BACKOFF, renewed=True))


@pytest.mark.parametrize(
    ("waiting", "rate", "seconds"), [(0, 0.0, 1), (32, 0.0, 1), (3, 2.0, 2), (9, 0.5, 20), (500, 0.1, 60), (0, 1e9, 1)]
)
def test_a_refused_caller_is_told_when_the_queue_will_have_drained(waiting, rate, seconds):
    assert retry_after(waiting, rate) == seconds


@given(st.integers(0, 10**6), st.floats(0, 1e9))
def test_retry_after_is_whole_seconds_from_1_to_60(waiting, rate):
    seconds = retry_after(waiting, rate)
    assert 1 <= seconds <= 60
    assert seconds == int(seconds)


views = st.builds(
    replica, st.sampled_from(S), free=st.integers(0, 3), occupied=st.integers(0, 4), load_failed=st.booleans(),
    seconds=st.floats(0, 120),
)  # fmt: skip
queues = st.builds(
    queue, st.integers(0, 6), st.integers(0, 5), in_all=st.integers(6, 20), limit_in_all=st.integers(5, 20)
)


@given(queues, st.lists(views, min_size=1, max_size=4), st.booleans())
def test_every_request_gets_the_one_verdict_that_its_situation_allows(waiting, replicas, refuse):
    verdict = decide(waiting, replicas, refuse_while_loading=refuse)
    place = choose(replicas)
    if verdict is Verdict.START:
        assert waiting.waiting == 0
        assert replicas[place].free_slots > 0
    elif place is not None:
        assert waiting.waiting, "a free slot that nobody waits for is used"
    if verdict is Verdict.QUEUE:
        assert waiting.waiting < waiting.limit
        assert waiting.waiting_in_all < waiting.limit_in_all
        assert not hopeless(replicas) or any(map(may_retry, replicas))
    if verdict is Verdict.REFUSE_FAILED:
        assert hopeless(replicas)
    if verdict is Verdict.REFUSE_LOADING:
        assert refuse


# --- which replica ---------------------------------------------------------------------------------------------------


def test_a_prompt_goes_where_its_beginning_was_read_unless_too_much_runs_there():
    """A sequence beside it costs as much as a block: four blocks known are worth up to three sequences more."""

    def views(occupied: int):
        free = ReplicaView(ReplicaState.READY, 8, 0, load_failed=False, seconds_in_state=1.0)
        knowing = ReplicaView(ReplicaState.READY, 8, occupied, load_failed=False, seconds_in_state=1.0, known_blocks=4)
        return [free, knowing]

    assert [choose(views(occupied)) for occupied in (0, 3, 4, 5)] == [1, 1, 0, 0]


def test_a_replica_that_knows_the_prompt_and_has_no_slot_is_not_waited_for():
    free = ReplicaView(ReplicaState.READY, 1, 3, load_failed=False, seconds_in_state=1.0)
    knowing = ReplicaView(ReplicaState.READY, 0, 4, load_failed=False, seconds_in_state=1.0, known_blocks=50)

    assert choose([free, knowing]) == 0


# --- who would wait in vain ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times_left", "wait"),
    [
        ([], 0.0),
        ([60.0, 60.0, 60.0], 6.0),
        ([60.0, 1.0, 1.0, 60.0], 4.0),  # two will have left before their turn
        ([0.0, -1.0], 0.0),
    ],
)
def test_the_wait_is_that_of_those_ahead_who_will_still_be_there(times_left, wait):
    assert expected_wait(times_left, 2.0) == wait


def test_how_long_a_slot_is_kept_is_not_said_before_three_requests_have_told():
    time = SlotTime()
    for seconds, mean, median in ((1.0, 0.0, 0.0), (2.0, 0.0, 0.0), (3.0, 2.0, 2.0), (30.0, 9.0, 2.5)):
        time.note(seconds)
        assert (time.mean, time.median) == (mean, median)
