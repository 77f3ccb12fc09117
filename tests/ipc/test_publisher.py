"""StepPublisher: never waits, never loses text, keeps each sequence's order; and waits when told to."""

from __future__ import annotations

import random
import threading
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimproc.ipc import wire
from slimproc.ipc.publisher import STUCK_BYTES, StepPublisher
from slimproc.ipc.ring import RingWriter
from slimproc.ipc.wire import Failed, Step, Tok
from slimproc.request import Finish, Usage
from tests.ipc.conftest import Ring


def decode(frames):
    """Steps and events, in the order of the ring."""
    return [wire.decode_step(payload) if kind == wire.STEP else wire.decode_event(payload) for kind, payload in frames]


def by_sequence(messages):
    """Per rid: its text, tokens, and what it heard in order, with neighbouring texts as one."""
    text: dict[int, str] = defaultdict(str)
    tokens: dict[int, int] = defaultdict(int)
    order: dict[int, list[object]] = defaultdict(list)
    for message in messages:
        for item in message.items if isinstance(message, Step) else [message]:
            heard = order[item.rid]
            if isinstance(item, Tok):
                text[item.rid] += item.text
                tokens[item.rid] += item.tokens
                if not heard or heard[-1] != "text":
                    heard.append("text")
                if item.finish:
                    heard.append((Finish(item.finish), item.usage))
            else:
                heard.append(item)
    return text, tokens, order


def fill(ring: Ring) -> int:
    """Put events for sequence 0 until the ring is full. Returns how many."""
    frames = 0
    payload = wire.encode(Failed(0, "x", "y" * 4000))
    while ring.writer.put(wire.EVENT, payload):
        frames += 1
    while ring.writer.put(wire.EVENT, wire.encode(Failed(0, "x", "y"))):
        frames += 1
    ring.writer.commit()
    return frames


@pytest.fixture
def publisher(ring):
    return StepPublisher(ring.writer)


def test_with_room_each_step_and_event_is_one_frame_at_once(ring, publisher):
    step = Step(1, [Tok(1, " a"), Tok(2, " b", 2, 1, Usage(3, 4, 5))])
    publisher.publish_event(Failed(3, "engine_error", "no"))
    publisher.publish(step)
    assert decode(ring.read()) == [Failed(3, "engine_error", "no"), step]
    assert publisher.backlog == 0
    assert publisher.flush()


def test_a_full_ring_joins_text_adds_tokens_and_keeps_the_end(ring, publisher):
    filled = fill(ring)
    for i in range(100):
        publisher.publish(Step(i, [Tok(rid, f" {i}é") for rid in (1, 2, 3)]))
    publisher.publish(Step(100, [Tok(2, "end", 1, int(Finish.STOP), Usage(7, 101, 0))]))
    assert publisher.backlog > 0
    assert ring.writer.full_hits == 101
    assert ring.writer.merged_tokens == 3 * 99 + 1
    messages = decode(ring.read())[filled:]
    assert messages == []
    assert publisher.flush()
    assert publisher.backlog == 0
    (step,) = decode(ring.read())
    whole = "".join(f" {i}é" for i in range(100))
    assert step.at_ns == 100
    assert step.items == [
        Tok(1, whole, 100),
        Tok(2, whole + "end", 101, int(Finish.STOP), Usage(7, 101, 0)),
        Tok(3, whole, 100),
    ]


def test_events_keep_their_place_among_their_sequences_items(ring, publisher):
    fill(ring)
    publisher.publish(Step(1, [Tok(1, "a")]))
    publisher.publish(Step(2, [Tok(1, "b"), Tok(2, "c")]))
    publisher.publish_event(Failed(1, "engine_error", "no"))
    publisher.publish(Step(3, [Tok(2, "d")]))
    publisher.publish_event(Failed(2, "engine_error", "neither"))
    ring.read()
    assert publisher.flush()
    _, tokens, order = by_sequence(decode(ring.read()))
    assert order[1] == ["text", Failed(1, "engine_error", "no")]
    assert order[2] == ["text", Failed(2, "engine_error", "neither")]
    assert tokens == {1: 2, 2: 2}


def test_what_a_sequence_says_after_an_event_does_not_join_what_it_said_before(ring, publisher):
    fill(ring)
    publisher.publish(Step(1, [Tok(1, "a")]))
    publisher.publish_event(Failed(1, "engine_error", "in the middle, to be strict"))
    publisher.publish(Step(2, [Tok(1, "b")]))
    ring.read()
    assert publisher.flush()
    assert decode(ring.read()) == [
        Step(2, [Tok(1, "a")]), Failed(1, "engine_error", "in the middle, to be strict"), Step(2, [Tok(1, "b")]),
    ]  # fmt: skip


def test_while_anything_waits_nothing_overtakes_it(ring, publisher):
    fill(ring)
    publisher.publish(Step(1, [Tok(1, "first")]))
    ring.read()
    publisher.publish(Step(2, [Tok(1, " second")]))
    text, _, _ = by_sequence(decode(ring.read()))
    assert text[1] == "first second"


def test_a_step_longer_than_a_frame_is_split_between_items(ring, publisher):
    items = [Tok(rid, f"{rid:03}" * 100) for rid in range(100)]
    publisher.publish(Step(9, items))
    assert publisher.backlog == 0
    frames = ring.read()
    assert all(len(payload) <= ring.writer.max_payload for _, payload in frames)
    assert [item for step in decode(frames) for item in step.items] == items
    assert len(frames) == 5, "30,000 bytes and an upper bound of 64 an item, in frames of 8,192"


@pytest.mark.parametrize("letter", ["x", "é", "語", "🎈"])
def test_one_giant_text_is_split_and_its_end_comes_with_the_last_part(ring, publisher, letter):
    text = "".join(f"{letter}{i}" for i in range(20_000))
    received = []
    publisher.publish(Step(1, [Tok(1, "before"), Tok(2, text, 3, int(Finish.LENGTH), Usage(1, 2, 0)), Tok(3, "after")]))
    for _ in range(100):
        frames = ring.read()
        assert all(len(payload) <= ring.writer.max_payload for _, payload in frames)
        received += decode(frames)
        if publisher.flush() and not frames:
            break
    texts, tokens, order = by_sequence(received)
    assert texts == {1: "before", 2: text, 3: "after"}
    assert tokens == {1: 1, 2: 3, 3: 1}
    assert order[2] == ["text", (Finish.LENGTH, Usage(1, 2, 0))]


def test_a_message_too_long_for_a_frame_is_cut_not_lost(ring, publisher):
    publisher.publish_event(Failed(1, "engine_error", "m" * 100_000, "prompt"))
    (event,) = decode(ring.read())
    assert event == Failed(1, "engine_error", "m" * 1000 + " …", "prompt")


def test_the_callers_step_is_never_changed(ring, publisher):
    fill(ring)
    step = Step(1, [Tok(1, "a"), Tok(2, "b")])
    publisher.publish(step)
    publisher.publish(step)
    assert step == Step(1, [Tok(1, "a"), Tok(2, "b")])


def test_stuck_is_told_by_age(ring):
    now = 100.0
    publisher = StepPublisher(ring.writer, clock=lambda: now)
    assert not publisher.stuck(1e9)
    fill(ring)
    publisher.publish(Step(1, [Tok(1, "a")]))
    now = 105.0
    publisher.publish(Step(2, [Tok(1, "b")]))
    assert not publisher.stuck(110.0)
    assert publisher.stuck(110.1)
    ring.read()
    assert publisher.flush()
    assert not publisher.stuck(1e9)


def test_stuck_is_told_by_size_and_everything_still_arrives(ring):
    publisher = StepPublisher(ring.writer, clock=lambda: 0.0)
    fill(ring)
    sent = 0
    while not publisher.stuck(0.0):
        publisher.publish(Step(1, [Tok(1, "0123456789" * 5000)]))
        sent += 50_000
    assert STUCK_BYTES < publisher.backlog < STUCK_BYTES + 100_000
    ring.read()
    received = 0
    while not publisher.flush() or publisher.backlog:
        received += sum(len(item.text) for step in decode(ring.read()) for item in step.items)
    received += sum(len(item.text) for step in decode(ring.read()) for item in step.items)
    assert received == sent
    assert publisher.backlog == 0


def test_a_credit_that_a_full_pipe_did_not_take_counts_as_backlog_until_flush():
    ring = Ring("pipe", 1 << 20)
    publisher = StepPublisher(ring.writer)
    steps = 0
    while not ring.writer.debt:
        publisher.publish(Step(steps, [Tok(1, "x")]))
        steps += 1
    assert publisher.backlog == ring.writer.debt > 0
    assert not publisher.flush()
    got = len(ring.read())
    assert ring.space.reader.take() > 0, "reading what a full pipe stood for always gives space back, and so a wake-up"
    assert publisher.flush()
    assert got + len(ring.read()) == steps
    ring.close()


TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_whatever_happens_each_sequence_hears_all_of_it_in_order(data):
    ring = Ring("pipe")
    publisher = StepPublisher(ring.writer)
    sent: list[object] = []
    received: list[object] = []
    alive = list(range(6))
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(["step", "step", "long", "event", "finish", "read", "fill"]))
        if what == "read":
            received += decode(ring.read())
        elif what == "fill":
            while publisher.backlog == 0:
                step = Step(0, [Tok(99, "z" * 7000)])
                publisher.publish(step)
                sent.append(step)
        elif what == "event":
            event = Failed(data.draw(st.sampled_from(range(6))), "engine_error", "in the middle, to be strict")
            publisher.publish_event(event)
            sent.append(event)
        else:
            texts = TEXTS.map(lambda text: text * 400) if what == "long" else TEXTS
            finish = int(Finish.STOP) if what == "finish" else 0
            rids = data.draw(st.lists(st.sampled_from(alive), unique=True)) if alive else []
            items = [Tok(rid, data.draw(texts), 1, finish, Usage(1, 1, 1) if finish else None) for rid in rids]
            if finish:
                alive = [rid for rid in alive if rid not in rids]
            publisher.publish(Step(1, items))
            sent.append(Step(1, items))
    for _ in range(1000):
        received += decode(ring.read())
        if publisher.flush():
            break
    received += decode(ring.read())
    ring.close()
    expected, got = by_sequence(sent), by_sequence(received)
    assert got[0] == expected[0]
    assert got[1] == expected[1]
    assert got[2] == expected[2]


# --- waiting for room -------------------------------------------------------------------------------------------


def test_waiting_for_room_keeps_every_step_a_frame_of_its_own(ring):
    """The reader is another thread here; nothing is joined, whatever the two make of each other's speed."""
    publisher = StepPublisher(ring.writer, wait_for_room=True)
    steps = [Step(i, [Tok(rid, f" {i}") for rid in range(32)]) for i in range(3000)]
    frames: list[tuple[int, bytes]] = []

    def read():
        while len(frames) < len(steps):
            frames.extend(ring.read())

    reader = threading.Thread(target=read)
    reader.start()
    for step in steps:
        publisher.publish(step)
    reader.join(60)
    assert decode(frames) == steps
    assert ring.writer.merged_tokens == 0


def test_while_it_waits_the_caller_is_asked_and_what_it_publishes_comes_later(ring):
    asked = 0

    def on_wait():
        nonlocal asked
        asked += 1
        if asked == 1:
            publisher.publish_event(Failed(2, "engine_error", "asked meanwhile"))
            publisher.publish(Step(2, [Tok(1, "", 0, int(Finish.CANCELLED), Usage())]))
            assert asked == 1, "publishing inside the wait must not wait itself"
        else:
            received.extend(ring.read())

    received: list[tuple[int, bytes]] = []
    publisher = StepPublisher(ring.writer, wait_for_room=True, on_wait=on_wait)
    filled = fill(ring)
    publisher.publish(Step(1, [Tok(1, "waited")]))
    assert asked == 2
    assert publisher.backlog == 0
    messages = decode(received + ring.read())[filled:]
    _, _, order = by_sequence(messages)
    assert order == {
        1: ["text", (Finish.CANCELLED, Usage())],
        2: [Failed(2, "engine_error", "asked meanwhile")],
    }
    assert messages[0] == Step(1, [Tok(1, "waited")])


def test_an_exception_ends_the_wait_and_loses_nothing(ring):
    class Leave(Exception):
        pass

    def leave():
        raise Leave

    publisher = StepPublisher(ring.writer, wait_for_room=True, on_wait=leave)
    fill(ring)
    with pytest.raises(Leave):
        publisher.publish(Step(1, [Tok(1, "a")]))
    ring.read()
    assert publisher.flush()
    assert decode(ring.read()) == [Step(1, [Tok(1, "a")])]


def test_a_reader_that_is_gone_ends_the_wait():
    ring = Ring("pipe")
    publisher = StepPublisher(ring.writer, wait_for_room=True)
    fill(ring)
    ring.space.close_writer()
    publisher.publish(Step(1, [Tok(1, "a")]))
    assert ring.writer.reader_gone
    assert publisher.backlog > 0
    ring.close()


def test_the_usual_step_costs_one_put_and_one_credit(ring, monkeypatch):
    """What makes the hot path hot: no look at the space credit, no second publication."""
    calls = []
    monkeypatch.setattr(ring.data.writer, "add", lambda n: calls.append(("add", n)))
    monkeypatch.setattr(RingWriter, "refresh", lambda _self: calls.append("refresh") or 0)
    publisher = StepPublisher(ring.writer)
    for i in range(10):
        publisher.publish(Step(i, [Tok(1, " x")]))
    assert calls == [("add", 32)] * 10


def test_backlog_blocks_never_exceed_half_a_frame():
    """Random pieces of random width: whatever is joined can be cut to frames again."""
    choose = random.Random(5)
    ring = Ring("pipe")
    publisher = StepPublisher(ring.writer)
    fill(ring)
    text = ""
    for i in range(3000):
        piece = choose.choice("aé語🎈") * choose.randrange(30)
        text += piece
        publisher.publish(Step(i, [Tok(1, piece)]))
    got = ""
    ring.read()
    while not publisher.flush():
        got += "".join(item.text for step in decode(ring.read()) for item in step.items)
    got += "".join(item.text for step in decode(ring.read()) for item in step.items)
    assert got == text
    ring.close()
