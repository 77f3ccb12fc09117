"""EngineLoop with a stub backend, a real ring and a real control socket: the test is the front, in the same process."""

from __future__ import annotations

import faulthandler
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slimproc.engines import loop as loop_module
from slimproc.engines.backend import Produced, SequenceFailed
from slimproc.engines.loop import PHASE_DECODE, PHASE_IDLE, PHASE_PREFILL, EngineLoop
from slimproc.engines.sequence import Sequence
from slimproc.errors import InvalidRequest
from slimproc.ipc import wire
from slimproc.ipc.control import ControlSocket
from slimproc.ipc.credit import create_credit, default_credit
from slimproc.ipc.publisher import StepPublisher
from slimproc.ipc.region import MIN_CAPACITY, create_region
from slimproc.ipc.ring import RingReader, RingWriter
from slimproc.request import Finish

LIMIT = 20.0
CONTEXT, SLOTS, VOCABULARY = 64, 3, 256
EPOCH = 9


class StubBackend:
    """A token is a byte. Every sequence says ``x`` for ever, but what its prompt says before a colon is done to it."""

    def __init__(self) -> None:
        self.poll_interval: float | None = 0.001
        self.piece = b"x"
        self.sequences: dict[int, Sequence] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.steps = 0
        self.added: list[int] = []

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return list(text.encode())

    def tokenize_spans(self, text: str, literals: list[tuple[int, int]]) -> list[int]:
        return list(text.encode())

    def detokenize(self, tokens: list[int]) -> bytes:
        return bytes(tokens)

    def add(self, sequence: Sequence) -> None:
        if sequence.prompt_text.startswith("refuse:"):
            raise InvalidRequest("refused by the backend", param="prompt")
        self.added.append(sequence.rid)
        self.sequences[sequence.rid] = sequence

    def remove(self, sequence: Sequence) -> None:
        del self.sequences[sequence.rid]

    def step(self) -> list[Produced | SequenceFailed]:
        self.gate.wait(LIMIT)
        self.steps += 1
        return [event for sequence in self.sequences.values() for event in self._events(sequence)]

    def _events(self, sequence: Sequence) -> list[Produced | SequenceFailed]:
        if sequence.prompt_text.startswith("burst:"):
            return [Produced(sequence, bytes([letter])) for letter in b"abcde"]
        return [self._event(sequence)]

    def _event(self, sequence: Sequence) -> Produced | SequenceFailed:
        what = sequence.prompt_text.partition(":")[0]
        if what == "fail":
            return SequenceFailed(sequence, "it failed")
        if what == "end":
            return Produced(sequence, b"e", end=True)
        return Produced(sequence, self.piece)

    def close(self) -> None:
        pass


class Front:
    """The other side: it sends commands, and keeps what it hears, by sequence."""

    def __init__(self, backend: StubBackend, *, wait_for_room: bool = False, tokens: list[str] | None = None) -> None:
        self.backend = backend
        ours, theirs = socket.socketpair()
        self.control, self._theirs = ControlSocket(ours), ControlSocket(theirs)
        kind = default_credit()
        self._data, self._space = create_credit(kind), create_credit(kind)
        region = create_region(MIN_CAPACITY, epoch=EPOCH, replica=0, credit=kind)
        self.reader = RingReader(region, self._data.reader, self._space.writer, epoch=EPOCH)
        self.writer = RingWriter(region, self._data.writer, self._space.reader)
        os.close(region)
        model = wire.ModelInfo(context=CONTEXT, slots=SLOTS, vocab_size=VOCABULARY, control_tokens=tokens or [])
        self.publisher = StepPublisher(self.writer, wait_for_room=wait_for_room)
        self.loop = EngineLoop(
            backend,
            wire.Ready(EPOCH, model, 0.0),
            control=self._theirs,
            ring=self.writer,
            publisher=self.publisher,
            step_limit=60.0,
        )
        self.reports: list[wire.Report] = []
        self.heard: dict[int, list[wire.Tok | wire.Failed]] = {}
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:  # noqa: BLE001  # told by the thread that waits
            self.failure = error

    # --- talking ------------------------------------------------------------------------------------------------------

    def send(self, *commands: wire.Command) -> None:
        for command in commands:
            self.control.send(wire.encode(command))

    def submit(self, rid: int, prompt: Any = "go", max_tokens: int | None = None, **fields: Any) -> None:
        self.send(wire.Submit(rid=rid, prompt=prompt, max_tokens=max_tokens, **fields))

    def listen(self, *, ring: bool = True) -> None:
        if self.control.unsent:
            self.control.flush()
        self.reports += map(wire.decode_report, self.control.receive())
        while ring and self.reader.drain(self._on_frame):
            pass

    def _on_frame(self, kind: int, payload: bytes, alone: bool) -> None:  # noqa: FBT001  # as the ring calls it
        if kind == wire.STEP:
            for item in wire.decode_step(payload).items:
                self._note(item.rid, item)
        else:
            event = wire.decode_event(payload)
            self._note(event.rid, event)

    def _note(self, rid: int, item: wire.Tok | wire.Failed) -> None:
        items = self.heard.setdefault(rid, [])
        assert not (items and is_terminal(items[-1])), f"{item} after the end of {rid}"
        items.append(item)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], Any], *, ring: bool = True) -> Any:
        deadline = time.monotonic() + LIMIT
        while not (value := condition()):
            assert self.failure is None, self.failure
            assert time.monotonic() < deadline, f"not in time; heard {self.heard}, {self.reports[-3:]}"
            self.listen(ring=ring)
            time.sleep(0.0005)
        return value

    def ended(self, rid: int) -> bool:
        items = self.heard.get(rid)
        return bool(items) and is_terminal(items[-1])

    def wait_end(self, rid: int) -> wire.Tok | wire.Failed:
        self.wait(lambda: self.ended(rid))
        return self.heard[rid][-1]

    def text(self, rid: int) -> str:
        return "".join(item.text for item in self.heard[rid] if isinstance(item, wire.Tok))

    def phase(self) -> int:
        return self.reader.black_box().phase

    def join(self) -> None:
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.backend.gate.set()
        if self._thread.is_alive():
            self.control.close()
            self.join()
        else:
            self.control.close()
        self.reader.close()
        self.writer.close()
        self._theirs.close()
        self._data.close()
        self._space.close()


def is_terminal(item: wire.Tok | wire.Failed) -> bool:
    return isinstance(item, wire.Failed) or bool(item.finish)


class Watchdog:
    """Stands in for faulthandler's, which would end the tests."""

    def __init__(self) -> None:
        self.armed = False
        self.times = 0

    def dump_traceback_later(self, timeout: float, *, exit: bool) -> None:  # noqa: A002  # faulthandler's own name
        assert exit
        self.armed = True
        self.times += 1

    def cancel_dump_traceback_later(self) -> None:
        self.armed = False


@pytest.fixture
def watchdog(monkeypatch: pytest.MonkeyPatch) -> Watchdog:
    watchdog = Watchdog()
    monkeypatch.setattr(faulthandler, "dump_traceback_later", watchdog.dump_traceback_later)
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", watchdog.cancel_dump_traceback_later)
    return watchdog


@pytest.fixture
def backend() -> StubBackend:
    return StubBackend()


@pytest.fixture
def make_front(backend: StubBackend, watchdog: Watchdog) -> Iterator[Callable[..., Front]]:
    made: list[Front] = []

    def make(**options: Any) -> Front:
        made.append(Front(backend, **options))
        made[-1].start()
        return made[-1]

    yield make
    for front in made:
        front.close()
    assert not any(front.failure for front in made)


@pytest.fixture
def front(make_front: Callable[..., Front]) -> Front:
    return make_front()


# --- its life ---------------------------------------------------------------------------------------------------------


def test_it_says_ready_first(front):
    front.wait(lambda: front.reports)
    (ready,) = front.reports
    assert isinstance(ready, wire.Ready)
    assert (ready.epoch, ready.model.slots) == (EPOCH, SLOTS)


def test_a_ready_that_is_larger_than_the_socket_takes_arrives_whole(make_front):
    tokens = [f"<|token {number}|>" for number in range(100_000)]
    front = make_front(tokens=tokens)
    front.wait(lambda: front.reports)
    assert front.reports[0].model.control_tokens == tokens


def test_shutdown_ends_it(front):
    front.send(wire.Shutdown())
    front.join()


def test_it_ends_when_the_front_is_gone_also_in_the_middle_of_work(front):
    front.submit(1)
    front.wait(lambda: front.heard.get(1))
    front.control.close()
    front.join()


# --- sequences --------------------------------------------------------------------------------------------------------


def test_a_sequence_gives_its_tokens_and_ends_once_with_exact_counts(front):
    front.submit(1, "four", 3)
    end = front.wait_end(1)
    assert front.text(1) == "xxx"
    assert Finish(end.finish) is Finish.LENGTH
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (4, 3)
    assert sum(item.tokens for item in front.heard[1]) == 3
    assert not front.backend.sequences


def test_a_sequence_without_a_limit_goes_to_the_end_of_the_context(front):
    front.submit(1, "a" * 60)
    assert front.wait_end(1).usage.completion_tokens == CONTEXT - 60


def test_several_tokens_of_a_step_go_out_as_one_item_and_what_is_behind_an_end_is_dropped(front, backend):
    """A backend that guesses ahead does not know where a stop string or a limit ends the text."""
    backend.gate.clear()
    front.submit(1, "go", 3)
    front.submit(2, "burst:", 13)
    front.submit(3, "burst:", None, stop=("cd",))
    backend.gate.set()
    for rid in (1, 2, 3):
        front.wait_end(rid)
    assert [front.text(rid) for rid in (1, 2, 3)] == ["xxx", "abcdeabcdeabc", "ab"]
    assert [item.tokens for item in front.heard[2]] == [5, 5, 3]
    assert [Finish(front.heard[rid][-1].finish) for rid in (1, 2, 3)] == [Finish.LENGTH, Finish.LENGTH, Finish.STOP]
    assert [front.heard[rid][-1].usage.completion_tokens for rid in (1, 2, 3)] == [3, 13, 4]
    assert not backend.sequences


def test_a_model_may_end_by_itself(front):
    front.submit(1, "end:")
    assert Finish(front.wait_end(1).finish) is Finish.STOP
    assert front.text(1) == "e"


@pytest.mark.parametrize("prompt", ["wörter", list("wörter".encode())], ids=["text", "ids"])
def test_an_echo_is_the_prompt_before_the_first_token_and_counts_as_none(front, prompt):
    front.submit(1, prompt, 2, echo=True)
    end = front.wait_end(1)
    assert front.text(1) == "wörterxx"
    assert end.usage.completion_tokens == 2
    assert front.heard[1][0].text.startswith("wörter")
    assert sum(item.tokens for item in front.heard[1]) == 2


@pytest.mark.parametrize("echo", [False, True])
def test_no_tokens_at_all_never_reach_the_backend(front, echo):
    front.submit(1, "hello", 0, echo=echo)
    end = front.wait_end(1)
    assert Finish(end.finish) is Finish.LENGTH
    assert front.text(1) == ("hello" if echo else "")
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (5, 0)
    assert front.backend.added == []


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": ""}, "invalid_request_error", "prompt"),
        ({"prompt": []}, "invalid_request_error", "prompt"),
        ({"prompt": [5, VOCABULARY]}, "invalid_request_error", "prompt"),
        ({"prompt": [-1]}, "invalid_request_error", "prompt"),
        ({"prompt": "a" * CONTEXT}, "context_length_exceeded", "prompt"),
        ({"prompt": [1] * CONTEXT}, "context_length_exceeded", "prompt"),
        ({"prompt": "a" * CONTEXT, "chat": True}, "context_length_exceeded", "messages"),
        ({"prompt": "a" * CONTEXT, "max_tokens": 0}, "context_length_exceeded", "prompt"),
        ({"prompt": "refuse:"}, "invalid_request_error", "prompt"),
        ({"logprobs": 0}, "invalid_request_error", "logprobs"),  # this backend gives none: never silently null
        ({"logprobs": 1, "echo": True}, "invalid_request_error", "logprobs"),
    ],
)
def test_what_cannot_be_served_is_refused_without_native_code(front, fields, code, param):
    front.submit(1, **fields)
    failed = front.wait_end(1)
    assert (failed.code, failed.param) == (code, param)
    assert len(front.heard[1]) == 1
    assert front.backend.added == []
    front.submit(2, "go", 1)
    front.wait_end(2)


def test_more_sequences_than_slots_are_an_error_of_the_fronts(front):
    for rid in range(1, SLOTS + 2):
        front.submit(rid)
    failed = front.wait_end(SLOTS + 1)
    assert (failed.code, failed.message) == ("engine_error", "the engine has no free slot")
    assert len(front.backend.sequences) == SLOTS


def test_a_sequence_that_fails_does_not_touch_its_neighbours(front):
    front.submit(1)
    front.submit(2, "fail:", echo=True)
    failed = front.wait_end(2)
    assert (failed.code, failed.message) == ("engine_error", "it failed")
    assert front.text(2) == "fail:", "what was said before the failure comes before it"
    front.wait_end(1)
    assert front.text(1) == "x" * (CONTEXT - 2)


# --- cancelling -------------------------------------------------------------------------------------------------------


def test_a_cancelled_sequence_ends_between_two_steps_with_what_it_had(front, backend):
    front.submit(1)
    front.wait(lambda: len(front.heard.get(1, ())) > 2)
    front.send(wire.Cancel(1), wire.Cancel(1))
    end = front.wait_end(1)
    assert Finish(end.finish) is Finish.CANCELLED
    assert end.usage.completion_tokens == len(front.text(1))
    assert not backend.sequences


def test_a_sequence_that_is_cancelled_before_its_first_step_ends_too(front, backend):
    backend.gate.clear()
    front.submit(1)
    front.wait(lambda: backend.sequences)
    front.submit(2, "go", None, echo=True)
    front.send(wire.Cancel(2))
    backend.gate.set()
    assert Finish(front.wait_end(2).finish) is Finish.CANCELLED
    assert front.text(2) in ("go", "gox")


def test_cancelling_what_has_ended_or_never_was_changes_nothing(front):
    front.submit(1, "go", 1)
    front.wait_end(1)
    front.send(wire.Cancel(1), wire.Cancel(99))
    front.submit(2, "go", 1)
    front.wait_end(2)
    assert set(front.heard) == {1, 2}


# --- questions --------------------------------------------------------------------------------------------------------


def test_questions_are_answered_while_sequences_run_and_while_none_does(front):
    front.wait(lambda: front.reports)
    for running in (False, True):
        if running:
            front.submit(1)
        count = len(front.reports)
        front.send(
            wire.Tokenize(1, "ab", add_special=True, parse_special=True),
            wire.Detokenize(2, [97, 98]),
            wire.Detokenize(3, [VOCABULARY]),
        )
        front.wait(lambda count=count: len(front.reports) == count + 3)
        answers = front.reports[count:]
        assert answers[:2] == [wire.Tokenized(1, [97, 98]), wire.Detokenized(2, "ab")]
        assert (answers[2].question, answers[2].param) == (3, "tokens")


def test_answers_that_are_larger_than_the_socket_takes_arrive_whole_and_in_order(front):
    text = "word " * 200_000
    for number in range(5):
        front.send(wire.Tokenize(number, text, add_special=True, parse_special=True))
    front.submit(1, "go", 3)
    front.wait(lambda: len(front.reports) == 6)
    assert [report.question for report in front.reports[1:]] == list(range(5))
    assert all(len(report.tokens) == len(text) for report in front.reports[1:])
    front.wait_end(1)


# --- a full ring ------------------------------------------------------------------------------------------------------


def fill(front: Front) -> None:
    """Let sequence 1 run until the ring is full, without reading it."""
    front.backend.piece = b"y" * 2000
    front.submit(1)
    front.wait(lambda: front.writer.full_hits, ring=False)


@pytest.mark.parametrize("wait_for_room", [True, False], ids=["waits", "merges"])
def test_commands_are_heard_while_the_ring_is_full(make_front, backend, wait_for_room):
    front = make_front(wait_for_room=wait_for_room)
    fill(front)
    front.send(wire.Tokenize(7, "ab", add_special=True, parse_special=True), wire.Cancel(1))
    front.submit(2, "go", 2)
    front.wait(lambda: len(front.reports) == 2, ring=False)
    end = front.wait_end(1)
    assert Finish(end.finish) in (Finish.CANCELLED, Finish.LENGTH)
    assert front.text(1) == "y" * 2000 * end.usage.completion_tokens
    front.wait_end(2)


def test_a_cancellation_heard_while_a_failure_waits_for_room_ends_each_sequence_once(make_front, backend):
    """One step made tokens of two sequences and the failure of a third; publishing it waits, and who waits hears."""
    front = make_front(wait_for_room=True)
    front.backend.piece = b"y" * 2000
    front.submit(1)
    front.submit(2)
    front.wait(lambda: front.writer.full_hits, ring=False)
    front.submit(3, "fail:")
    front.wait(lambda: 3 in backend.sequences, ring=False)
    front.wait(lambda: front.reader.drain(front._on_frame, 8) or 3 not in backend.sequences, ring=False)
    front.send(wire.Cancel(1), wire.Cancel(2), wire.Cancel(3))
    for rid in (1, 2, 3):
        front.wait_end(rid)
    assert not backend.sequences


def test_an_engine_whose_front_has_stopped_reading_stops_working_and_goes_on_hearing(make_front, backend, monkeypatch):
    monkeypatch.setattr(StepPublisher, "stuck", lambda self, now: bool(self.backlog))
    backend.poll_interval = None
    front = make_front()
    fill(front)
    front.wait(lambda: front.publisher.backlog, ring=False)
    front.send(wire.Tokenize(7, "ab", add_special=True, parse_special=True))
    front.wait(lambda: len(front.reports) == 2, ring=False)
    steps = backend.steps
    front.send(wire.Tokenize(8, "ab", add_special=True, parse_special=True))
    front.wait(lambda: len(front.reports) == 3, ring=False)
    assert backend.steps == steps
    front.wait_end(1)
    assert front.text(1) == "y" * 2000 * (CONTEXT - 2)


# --- what others see --------------------------------------------------------------------------------------------------


def test_the_black_box_says_what_it_is_about_and_for_whom(front, backend):
    front.wait(lambda: front.phase() == PHASE_IDLE)
    backend.gate.clear()
    front.submit(1)
    front.wait(lambda: front.phase() == PHASE_PREFILL)
    assert front.reader.black_box().rids == (1,)
    backend.gate.set()
    front.wait(lambda: front.phase() == PHASE_DECODE)
    front.submit(2)
    front.wait(lambda: set(front.reader.black_box().rids) == {1, 2} or front.ended(1))
    front.send(wire.Cancel(1), wire.Cancel(2))
    front.wait(lambda: front.phase() == PHASE_IDLE)
    assert front.reader.black_box().rids == ()
    assert front.reader.progress().steps == backend.steps


def test_the_watchdog_is_armed_in_a_step_and_never_while_idle(front, backend, watchdog):
    front.wait(lambda: front.reports and front.phase() == PHASE_IDLE)
    assert not watchdog.armed
    backend.gate.clear()
    front.submit(1, "go", 2)
    front.wait(lambda: watchdog.armed)
    backend.gate.set()
    front.wait_end(1)
    front.wait(lambda: not watchdog.armed)
    front.submit(2, "go", 0)
    front.wait_end(2)
    assert not watchdog.armed


def test_the_watchdog_is_fed_while_the_engine_waits_for_its_front(make_front, watchdog, monkeypatch):
    monkeypatch.setattr(loop_module, "_REARM_NS", 1)
    front = make_front(wait_for_room=True)
    fill(front)
    before = watchdog.times
    front.wait(lambda: watchdog.times > before + 1, ring=False)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("wait_for_room", [True, False], ids=["waits", "merges"])
def test_whatever_is_asked_every_sequence_ends_exactly_once(make_front, backend, seed, wait_for_room):
    """The front insists on silence after an end; here it also counts that none is missing."""
    chance = random.Random(seed)
    front = make_front(wait_for_room=wait_for_room)
    backend.piece = b"z" * 700
    backend.poll_interval = chance.choice([None, 0.0, 0.0005])
    for rid in range(1, 80):
        front.submit(rid, chance.choice(["go", "end:", "fail:", "refuse:", ""]), chance.choice([None, 0, 1, 5]))
        if chance.random() < 0.5:
            front.send(wire.Cancel(chance.randint(1, rid)))
        if chance.random() < 0.2:
            front.listen()
    for rid in range(1, 80):
        front.wait_end(rid)
    assert not backend.sequences
