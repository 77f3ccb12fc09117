"""A sequence with a grammar in the engine's loop: it waits beside the batch, joins it, is refused or cancelled."""

from __future__ import annotations

import select
import threading

import pytest

from slimproc.engines.grammar.vocabulary import GrammarVocabulary
from slimproc.errors import InvalidRequest
from slimproc.ipc import wire
from slimproc.request import Finish, GrammarSpec
from tests.engines.test_loop import SLOTS, Front, StubBackend, Watchdog
from tests.grammars import byte_vocabulary, schema

XS = GrammarSpec("regex", "x{3}", "guided_regex")
WRONG = schema({"type": "strin"})


class FollowingBackend(StubBackend):
    """``hold``: keeps the compiler from its work, as a long compilation does. ``quiet``: its steps make no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.hold = threading.Event()
        self.hold.set()
        self.grammars: list[object] = []
        self.quiet = False

    def step(self):
        return [] if self.quiet else super().step()

    def grammar_vocabulary(self) -> GrammarVocabulary:
        self.hold.wait(20)
        return byte_vocabulary()

    def add(self, sequence) -> None:
        super().add(sequence)
        self.grammars.append(sequence.grammar)

    def remove(self, sequence) -> None:
        self.sequences.pop(sequence.rid, None)


def asides(front: Front) -> list[tuple[int, bool]]:
    """What the front has heard of slots that are not needed, or are wanted back."""
    return [(report.rid, report.aside) for report in front.reports if isinstance(report, wire.Aside)]


@pytest.fixture
def backend():
    return FollowingBackend()


@pytest.fixture
def front(backend, monkeypatch):
    watchdog = Watchdog()
    monkeypatch.setattr("faulthandler.dump_traceback_later", watchdog.dump_traceback_later)
    monkeypatch.setattr("faulthandler.cancel_dump_traceback_later", watchdog.cancel_dump_traceback_later)
    front = Front(backend)
    front.start()
    yield front
    backend.hold.set()
    front.close()


def test_it_joins_the_batch_with_its_matcher_once_that_is_there(front, backend):
    front.submit(1, max_tokens=3, grammar=XS)
    assert front.wait_end(1).finish == Finish.LENGTH
    (matcher,) = backend.grammars
    assert matcher.mask()[ord("x") + 3]


def test_others_go_on_while_it_waits(front, backend):
    backend.hold.clear()
    front.submit(1, grammar=XS)
    front.submit(2, max_tokens=10)
    assert front.wait_end(2).finish == Finish.LENGTH
    assert backend.added == [2]
    backend.hold.set()
    front.wait(lambda: front.heard.get(1))


def test_steps_are_counted_while_nothing_but_a_grammar_is_waited_for(front, backend):
    """Being alive is judged by steps."""
    backend.hold.clear()
    front.submit(1, grammar=XS)
    front.wait(lambda: front.reader.progress().steps >= 2)
    assert backend.steps == 0


def test_others_have_its_slot_while_it_waits(front, backend):
    """However many wait: more than twice as many as there are slots do not keep a single one."""
    slow, plain = range(1, 2 * SLOTS + 3), range(100, 100 + SLOTS)
    backend.hold.clear()
    for rid in slow:
        front.submit(rid, max_tokens=2, grammar=XS)
    front.wait(lambda: asides(front) == [(rid, True) for rid in slow])
    for rid in plain:
        front.submit(rid, max_tokens=5)
    for rid in plain:
        assert front.wait_end(rid).finish == Finish.LENGTH
    assert backend.added == list(plain)
    assert set(front.heard) == set(plain)
    backend.hold.set()
    for rid in slow:
        assert front.wait_end(rid).finish == Finish.LENGTH
    assert asides(front)[len(slow) :] == [(rid, False) for rid in slow]
    assert all(backend.grammars[SLOTS:])


def test_with_its_grammar_it_waits_for_the_next_slot_and_nobody_passes_it(front, backend):
    backend.hold.clear()
    front.submit(1, max_tokens=1, grammar=XS)
    front.submit(2, max_tokens=1, grammar=XS)
    front.wait(lambda: len(asides(front)) == 2)
    backend.quiet = True
    for rid in range(3, 3 + SLOTS):
        front.submit(rid)
    backend.hold.set()
    front.wait(lambda: asides(front)[2:] == [(1, False), (2, False)])
    front.wait(lambda: len(backend.added) == SLOTS)
    front.send(wire.Cancel(3))
    front.submit(50, max_tokens=1)  # the front may not have heard yet that its slot is wanted back
    front.wait(lambda: 1 in backend.added)
    backend.quiet = False
    for rid in (1, 2, 50):
        assert front.wait_end(rid).finish == Finish.LENGTH
    assert backend.added[SLOTS:] == [1, 2, 50]


def test_it_can_be_cancelled_while_it_waits_for_a_slot(front, backend):
    backend.hold.clear()
    front.submit(1, grammar=XS)
    front.wait(lambda: asides(front))
    backend.quiet = True
    for rid in range(2, 2 + SLOTS):
        front.submit(rid)
    front.wait(lambda: len(backend.added) == SLOTS)
    backend.hold.set()
    front.wait(lambda: len(asides(front)) == 2)
    front.send(wire.Cancel(1))
    assert front.wait_end(1).finish == Finish.CANCELLED
    front.send(wire.Cancel(2))
    front.wait_end(2)
    backend.quiet = False
    front.submit(60, max_tokens=1)
    front.wait_end(60)
    assert 1 not in backend.added


def test_no_more_than_slots_join_however_many_wait(front, backend):
    most = []
    stepping = backend.step
    backend.step = lambda: most.append(len(backend.sequences)) or stepping()
    backend.hold.clear()
    for rid in range(1, 3 * SLOTS):
        front.submit(rid, max_tokens=3, grammar=XS)
    front.wait(lambda: len(asides(front)) == 3 * SLOTS - 1)
    backend.hold.set()
    for rid in range(1, 3 * SLOTS):
        front.wait_end(rid)
    assert max(most) <= SLOTS


def test_beyond_a_number_each_has_its_slot_while_it_waits(front, backend, monkeypatch):
    """They would else be a queue without a limit."""
    monkeypatch.setattr(wire, "MOST_ASIDE", 2)
    backend.hold.clear()
    for rid in range(1, 3 + SLOTS):
        front.submit(rid, max_tokens=1, grammar=XS)
    front.submit(99, max_tokens=1)
    assert "no free slot" in front.wait_end(99).message
    assert asides(front) == [(1, True), (2, True)]
    backend.hold.set()
    for rid in range(1, 3 + SLOTS):
        assert front.wait_end(rid).finish == Finish.LENGTH
    assert asides(front)[2:] == [(1, False), (2, False)]


def test_what_was_lent_and_has_ended_makes_no_room_for_more(front, backend):
    """As many as there are slots, whatever became of those before."""
    backend.hold.clear()
    front.submit(1, grammar=WRONG)
    front.submit(2, grammar=XS)
    front.wait(lambda: len(asides(front)) == 2)
    front.send(wire.Cancel(2))
    backend.hold.set()
    front.wait_end(1)
    front.wait_end(2)
    backend.quiet = True
    for rid in range(3, 3 + SLOTS):
        front.submit(rid)
    front.submit(99, max_tokens=1)
    assert "no free slot" in front.wait_end(99).message


def test_it_can_be_cancelled_while_it_waits(front, backend):
    backend.hold.clear()
    front.submit(1, grammar=XS, echo=True)
    front.submit(2, max_tokens=1)
    front.wait_end(2)
    front.send(wire.Cancel(1))
    assert front.wait_end(1).finish == Finish.CANCELLED
    backend.hold.set()
    front.submit(3, max_tokens=1, grammar=XS)
    front.wait_end(3)
    assert backend.added == [2, 3]


def test_it_can_be_cancelled_while_the_refusal_of_one_before_it_waits_for_room(front, backend):
    """Both have been compiled, in one step. A publisher that waits hears commands."""
    publish = front.publisher.publish_event

    def hear_first(event):
        if event.rid == 1:
            front.loop._handle(wire.Cancel(2))
        publish(event)

    front.publisher.publish_event = hear_first
    backend.hold.clear()
    front.submit(1, grammar=WRONG)
    front.submit(2, grammar=XS)
    front.wait(lambda: len(asides(front)) == 2)
    backend.gate.clear()
    front.submit(3)
    front.wait(lambda: backend.sequences)
    backend.hold.set()
    front.wait(lambda: front.loop._grammars._done.qsize() == 2)
    backend.gate.set()
    assert front.wait_end(1).param == "response_format"
    assert front.wait_end(2).finish == Finish.CANCELLED
    front.submit(4, max_tokens=1, grammar=XS)
    assert front.wait_end(4).finish == Finish.LENGTH
    assert backend.added == [3, 4]


def test_what_nobody_waits_for_any_more_does_not_keep_the_engine_awake(front, backend):
    backend.hold.clear()
    front.submit(1, grammar=XS)
    front.submit(2, max_tokens=1)
    front.wait_end(2)
    front.send(wire.Cancel(1))
    front.wait_end(1)
    awake = select.poll()
    awake.register(front.loop._grammars.fd, select.POLLIN)
    taken = front.loop._grammars.done
    times = []
    front.loop._grammars.done = lambda: times.append(1) or taken()
    backend.hold.set()
    front.wait(lambda: times and not awake.poll(0))
    front.submit(3, max_tokens=1)
    front.wait_end(3)
    assert len(times) < 10


def test_a_grammar_that_cannot_be_compiled_is_the_requests_fault_and_its_echo_is_not_heard(front):
    for rid in (1, 2):  # the second time it is known to be wrong
        front.submit(rid, grammar=WRONG, echo=True)
        failure = front.wait_end(rid)
        assert (failure.code, failure.param) == (InvalidRequest.code, "response_format")
        assert len(front.heard[rid]) == 1


def test_the_echo_comes_before_the_answer(front):
    front.submit(1, "go", max_tokens=2, grammar=XS, echo=True)
    front.wait_end(1)
    assert front.text(1) == "goxx"


def test_nothing_is_compiled_for_a_sequence_that_generates_nothing(front, backend):
    backend.hold.clear()
    front.submit(1, max_tokens=0, grammar=WRONG)
    assert front.wait_end(1).finish == Finish.LENGTH


def test_a_backend_may_still_refuse_a_sequence_whose_grammar_is_there(front, backend):
    front.submit(1, "refuse:", grammar=XS)
    assert front.wait_end(1).param == "prompt"
    front.submit(2, max_tokens=1, grammar=XS)
    assert front.wait_end(2).finish == Finish.LENGTH


def test_an_engine_that_is_told_to_stop_does_not_wait_for_a_compilation(front, backend, monkeypatch):
    monkeypatch.setattr("slimproc.engines.grammar.compiler._CLOSE_LIMIT", 0.05)
    backend.hold.clear()
    front.submit(1, grammar=XS)
    front.submit(2, max_tokens=1)
    front.wait_end(2)
    front.send(wire.Shutdown())
    front.join()
