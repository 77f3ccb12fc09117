"""Items with log probabilities through a full ring: none is lost, and each stays with its own text."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimproc.ipc import wire
from slimproc.ipc.joined import logprob_bytes
from slimproc.ipc.publisher import StepPublisher
from slimproc.ipc.wire import Failed, Logprob, ScoredTok, Step, Tok
from slimproc.request import Finish, Usage


def scored(rid: int, number: int, alternatives: int = 3, **rest: object) -> ScoredTok:
    piece = f" t{number}é"
    top = [(b"alternative %d" % place, -1.5) for place in range(alternatives)]
    return ScoredTok(rid, piece, logprobs=[Logprob(piece.encode(), -float(number), top, number)], **rest)


def fill(ring) -> None:
    payload = wire.encode(Failed(0, "x", "y" * 4000))
    while ring.writer.put(wire.EVENT, payload):
        pass
    while ring.writer.put(wire.EVENT, wire.encode(Failed(0, "x", "y"))):
        pass
    ring.writer.commit()


def received(ring) -> list[wire.Tok | Failed]:
    """What is not the filling, in the front's order."""
    heard: list[wire.Tok | Failed] = []
    for kind, payload in ring.read():
        if kind == wire.STEP:
            step = wire.decode_step(payload)
            heard += [*(step.scored or ()), *step.items]
        elif (event := wire.decode_event(payload)).rid:
            heard.append(event)
    return heard


def drain(ring, publisher: StepPublisher) -> list[wire.Tok | Failed]:
    heard = received(ring)
    while not publisher.flush():
        heard += received(ring)
    return heard + received(ring)


@pytest.fixture
def publisher(ring):
    return StepPublisher(ring.writer)


def test_with_room_a_step_goes_out_as_it_is(ring, publisher):
    step = Step(1, [Tok(1, "a")], [scored(2, 0)])
    publisher.publish(step)
    assert [wire.decode_step(payload) for _, payload in ring.read()] == [step]


def test_a_full_ring_joins_them_in_order_up_to_the_end(ring, publisher):
    fill(ring)
    usage = Usage(1, 50, 0)
    for number in range(50):
        end = {"finish": int(Finish.STOP), "usage": usage} if number == 49 else {}
        publisher.publish(Step(number, [Tok(1, "x")], [scored(2, number, **end)]))
    heard = drain(ring, publisher)
    plain = [item for item in heard if item.rid == 1]
    items = [item for item in heard if item.rid == 2]
    assert plain == [Tok(1, "x" * 50, 50)]
    assert all(isinstance(item, ScoredTok) for item in items)
    assert [one.offset for item in items for one in item.logprobs] == list(range(50))
    assert sum(item.tokens for item in items) == 50
    assert [(item.finish, item.usage) for item in items if item.finish] == [(Finish.STOP, usage)]
    assert items[-1].finish


def test_a_joined_item_longer_than_a_frame_is_cut_and_each_token_stays_with_its_text(ring, publisher):
    fill(ring)
    for number in range(400):
        publisher.publish(Step(number, [], [scored(2, number, alternatives=20)]))
    items = drain(ring, publisher)
    assert len(items) > 10
    for item in items:
        assert item.text.encode() == b"".join(one.piece for one in item.logprobs)
    assert [one.offset for item in items for one in item.logprobs] == list(range(400))
    assert sum(item.tokens for item in items) == 400
    assert publisher.backlog == 0


def test_a_step_longer_than_a_frame_is_cut_without_a_full_ring(ring, publisher):
    publisher.publish(Step(1, [], [scored(2, number, alternatives=20) for number in range(100)]))
    items = drain(ring, publisher)
    assert [one.offset for item in items for one in item.logprobs] == list(range(100))


def test_a_plain_end_joins_them_and_an_event_keeps_its_place(ring, publisher):
    fill(ring)
    publisher.publish(Step(1, [], [scored(2, 0)]))
    publisher.publish(Step(2, [Tok(2, "", 0, int(Finish.CANCELLED), Usage(1, 1, 0))]))
    publisher.publish(Step(3, [], [scored(3, 0)]))
    publisher.publish_event(Failed(3, "engine_error", "no"))
    first, second, event = drain(ring, publisher)
    assert (first.finish, len(first.logprobs), len(second.logprobs)) == (Finish.CANCELLED, 1, 1)
    assert event == Failed(3, "engine_error", "no")


def test_plain_items_before_scored_ones_stay_before_them(ring, publisher):
    fill(ring)
    publisher.publish(Step(1, [Tok(2, "before")]))
    publisher.publish(Step(2, [], [scored(2, 0), scored(2, 1)]))
    before, *after = drain(ring, publisher)
    assert before == Tok(2, "before")
    assert [one.offset for item in after for one in item.logprobs] == [0, 1]


@pytest.mark.parametrize("seed", range(4))
def test_no_schedule_of_a_slow_front_loses_or_moves_a_token(ring, publisher, seed):
    dice = random.Random(seed)
    fill(ring)
    numbers = {2: 0, 3: 0}
    heard = []
    for at in range(150):
        items: list[ScoredTok] = []
        for rid, said in numbers.items():
            more = dice.randrange(4)
            items += [scored(rid, said + place, alternatives=dice.choice([0, 5, 20])) for place in range(more)]
            numbers[rid] += more
        publisher.publish(Step(at, [Tok(1, "x")], items or None))
        if dice.random() < 0.1:
            heard += received(ring)
    heard += drain(ring, publisher)
    for rid, count in numbers.items():
        items = [item for item in heard if item.rid == rid]
        assert [one.offset for item in items for one in item.logprobs] == list(range(count))
        assert all(item.text.encode() == b"".join(one.piece for one in item.logprobs) for item in items)
        assert sum(item.tokens for item in items) == count
    assert sum(item.tokens for item in heard if item.rid == 1) == 150


FLOATS = st.floats(max_value=0, allow_nan=False)
LOGPROBS = st.builds(
    Logprob,
    piece=st.binary(),
    logprob=st.none() | FLOATS,
    top=st.lists(st.tuples(st.binary(), FLOATS)),
    offset=st.integers(0, 2**64 - 1),
)


@given(LOGPROBS)
def test_its_size_on_the_wire_is_bounded_by_what_we_say(one):
    payload = wire.encode(one)
    assert len(payload) <= logprob_bytes(one)
    step = Step(1, [], [ScoredTok(1, "é", logprobs=[one])])
    assert wire.decode_step(wire.encode(step)) == step


def test_a_step_without_them_pays_one_byte_for_all_its_tokens():
    bare = wire.encode([1, [[1, "x", 1, 0, None], [2, "y", 1, 0, None]]])
    assert len(wire.encode(Step(1, [Tok(1, "x"), Tok(2, "y")]))) == len(bare) + 1
