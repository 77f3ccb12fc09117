"""The fake backend's latencies are kept without a sleep: each step gives what is due."""

from itertools import pairwise

import pytest
from driving import Clock, add, run, script, times
from hypothesis import given, settings
from hypothesis import strategies as st

from slimproc.engines.backend import Produced
from slimproc.engines.fake import FakeBackend
from slimproc.settings import EngineSettings


def test_flat_out_a_step_is_due_at_once_and_nothing_is_due_when_nothing_runs(make):
    backend = make()
    assert backend.poll_interval is None

    sequence = add(backend)
    assert backend.poll_interval == 0

    backend.remove(sequence)
    assert backend.poll_interval is None
    assert backend.step() == []


def test_tokens_come_a_latency_apart_after_the_time_to_first_token(make, clock):
    backend = make(ttft=0.5, token_latency=0.25)
    sequence = add(backend, script(tokens=["a", "b", "c"]))

    assert backend.poll_interval == 0.5
    assert times(run(backend, clock), sequence) == [0.5, 0.75, 1.0]


def test_a_step_before_anything_is_due_gives_nothing(make, clock):
    backend = make(ttft=0.5)
    add(backend)

    clock.now += 0.25

    assert backend.step() == []
    assert backend.poll_interval == 0.25


def test_a_script_may_change_the_latency_of_its_request(make, clock):
    backend = make(token_latency=0.25)
    fast = add(backend, script(tokens=["a"] * 3, token_latency=0))
    slow = add(backend, script(tokens=["a"] * 3, token_latency=2))

    heard = run(backend, clock)

    assert times(heard, fast) == [0, 0, 0]
    assert times(heard, slow) == [0, 2, 4]


def test_sequences_of_one_latency_are_advanced_by_the_same_steps(make, clock):
    backend = make(token_latency=1.0)
    first = add(backend, script(tokens=["a"] * 5))
    backend.step()
    clock.now += 0.5
    second = add(backend, script(tokens=["a"] * 3))

    heard = run(backend, clock)

    assert times(heard, first) == [1, 2, 3, 4]
    assert times(heard, second) == [0.5, 2, 3]


def test_lateness_does_not_add_up_and_missed_steps_are_not_made_up(make, clock):
    backend = make(token_latency=1.0)
    add(backend)
    backend.step()

    clock.now += 1.25
    assert len(backend.step()) == 1
    assert backend.poll_interval == 0.75

    clock.now += 10
    assert len(backend.step()) == 1
    assert backend.poll_interval == 1.0


def test_prefill_takes_its_steps_and_their_time(make, clock):
    backend = make()
    sequence = add(backend, script(tokens=["a"], prefill_steps=3, prefill_latency=0.5))

    for _ in range(2):
        clock.now += 0.5
        assert backend.step() == []
    clock.now += 0.5

    assert backend.step() == [Produced(sequence, b"a", end=True)]


def test_prefill_without_latency_still_takes_steps(make):
    backend = make()
    add(backend, script(prefill_steps=3))

    assert [len(backend.step()) for _ in range(4)] == [0, 0, 1, 1]


def test_the_longer_of_prefill_and_time_to_first_token_decides(make, clock):
    backend = make(ttft=2.0)
    short = add(backend, script(tokens=["a"], prefill_steps=2, prefill_latency=0.5))
    long = add(backend, script(tokens=["a"], prefill_steps=2, prefill_latency=1.5))

    heard = run(backend, clock)

    assert times(heard, short) == [2.0]
    assert times(heard, long) == [3.0]


@pytest.mark.parametrize(
    ("prompt", "steps"),
    [
        (script(prefill_steps=5, prefill_latency=1), 2),
        (script(token_latency=1), 1),
        (script(token_latency=1), 3),
        (script(), 3),
    ],
)
def test_a_removed_sequence_is_forgotten_at_any_stage_and_its_neighbour_goes_on(make, clock, prompt, steps):
    backend = make()
    neighbour = add(backend, script(tokens=["a"], repeat=10, token_latency=1, prefill_steps=1))
    sequence = add(backend, prompt)
    for _ in range(steps):
        clock.now += backend.poll_interval
        backend.step()

    backend.remove(sequence)
    backend.remove(sequence)
    heard = run(backend, clock)

    assert sequence not in heard
    assert heard[neighbour][-1][1].end
    assert backend.poll_interval is None


def test_who_is_due_next_is_right_after_the_first_in_line_was_removed(make, clock):
    backend = make()
    first, last, middle = (
        add(backend, script(tokens=["a"], prefill_steps=1, prefill_latency=due)) for due in (1, 5, 2)
    )

    backend.remove(first)

    assert backend.poll_interval == 2
    heard = run(backend, clock)
    assert times(heard, middle) == [2]
    assert times(heard, last) == [5]


def test_a_sequence_that_ended_gives_nothing_more_even_when_nobody_removes_it(make):
    backend = make()
    endless = add(backend)
    add(backend, script(tokens=["a"]))
    add(backend, script(error_at=1))
    last = add(backend)

    assert len(backend.step()) == 4
    assert [event.sequence for event in backend.step()] == [endless, last]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 6),
            st.sampled_from([0, 0.25, 1.0, 1.5]),
            st.integers(0, 3),
            st.sampled_from([0.0, 0.5]),
            st.sampled_from([0.0, 0.3, 2.0]),
        ),
        max_size=6,
    )
)
def test_every_answer_is_whole_and_no_two_tokens_are_closer_than_the_latency(wanted):
    clock = Clock()
    backend = FakeBackend(EngineSettings(model="m", backend="fake"), clock=clock, sleep=clock.sleep)
    heard = {}
    asked = {}
    for length, latency, prefill_steps, prefill_latency, gap in wanted:
        keys = {"prefill_latency": prefill_latency} if prefill_steps else {}
        tokens = [f"t{index}" for index in range(length)]
        prompt = script(tokens=tokens, token_latency=latency, prefill_steps=prefill_steps, **keys)
        asked[add(backend, prompt)] = (tokens, latency)
        until = clock.now + gap
        while (wait := backend.poll_interval) is not None and clock.now + wait <= until:
            collect(heard, run(backend, clock, steps=1))
        clock.now = until
    collect(heard, run(backend, clock))

    for sequence, (tokens, latency) in asked.items():
        events = heard[sequence]
        assert [event.piece.decode() for _, event in events] == tokens
        assert [event.end for _, event in events] == [False] * (len(tokens) - 1) + [True]
        at = [moment for moment, _ in events]
        assert all(later - sooner >= latency - 1e-9 for sooner, later in pairwise(at))


def collect(heard, more):
    for sequence, events in more.items():
        heard.setdefault(sequence, []).extend(events)


def test_flat_out_it_asks_the_loop_to_wait_for_room(make):
    assert make().wait_for_room
    assert not make(token_latency=0.01).wait_for_room
