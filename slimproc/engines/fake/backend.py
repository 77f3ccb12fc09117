"""FakeBackend: the batch of the fake backend, and its loads and unloads.

A sequence waits (prefill, ``ttft``), gives its first token, and then goes with a *lane*: all sequences with the same
token latency, which get their next tokens in the same step, as a real model's batch does.
"""

from __future__ import annotations

import heapq
import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import TYPE_CHECKING, Final

from slimproc.engines.fake import vectors, vocabulary
from slimproc.engines.fake.answer import answer
from slimproc.engines.fake.memory import FakeMemory
from slimproc.engines.fake.scores import scored
from slimproc.engines.fake.script import parse
from slimproc.errors import InvalidRequest, LoadFailed
from slimproc.ipc.wire import ModelInfo
from slimproc.request import EMBED, GENERATE, RERANK

if TYPE_CHECKING:
    from slimproc.engines.backend import Event
    from slimproc.engines.grammar.vocabulary import GrammarVocabulary
    from slimproc.engines.sequence import Sequence
    from slimproc.settings import EngineSettings

_NATIVE_CONTEXT: Final = 1_048_576
_DEFAULT_CONTEXT: Final = 4096
_PROGRESS_EVERY: Final = 0.05
_HANG: Final = 3600.0
_CHATML: Final = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class _Run:
    """What the backend remembers of one sequence, in ``sequence.state``."""

    __slots__ = ("events", "first_at", "latency", "prefill_latency", "prefill_left", "sequence", "started")

    def __init__(self, sequence: Sequence, events: Iterator[Event], *, latency: float, first_at: float) -> None:
        self.sequence = sequence
        self.events = events
        self.latency = latency
        self.first_at = first_at
        self.prefill_left = 0
        self.prefill_latency = 0.0
        self.started = False


class _Lane:
    """The sequences of one token latency, and when all of them are due."""

    __slots__ = ("due", "members")

    def __init__(self, due: float) -> None:
        self.due = due
        self.members: dict[Sequence, Iterator[Event]] = {}


class FakeBackend:
    """See ``backend.Backend``. ``clock`` (monotonic seconds) and ``sleep`` are arguments for tests."""

    gives_logprobs = gives_prompt_logprobs = True

    def __init__(
        self,
        settings: EngineSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._settings = settings
        self._fake = settings.fake
        self._clock = clock
        self._sleep = sleep
        self._memory = FakeMemory()
        self.scratch = self._memory.scratch
        self.wait_for_room = self._fake.token_latency == 0
        """Flat out, the loop waits for room in the ring: merging would let it run ahead of any reader without end."""
        self._flat_out: dict[Sequence, Iterator[Event]] = {}
        self._lanes: dict[float, _Lane] = {}
        self._waiting: list[tuple[float, int, _Run]] = []
        """A heap by due time: who has no lane yet."""
        self._order = count()
        self._ended: list[Sequence] = []
        """Who gave the last event in the step before, in case the loop has not removed it."""
        self._begin_to_spin: list[Sequence] = []
        self._spinning: set[Sequence] = set()

    def __repr__(self) -> str:
        lanes = sum(len(lane.members) for lane in self._lanes.values())
        return f"<FakeBackend {len(self._flat_out)} flat out, {lanes} in step, {len(self._waiting)} waiting>"

    # --- loading ----------------------------------------------------------------------------------------------

    def load(self, progress: Callable[[float], None]) -> ModelInfo:
        """Take ``load_time``, and fail or die as set: death comes halfway. Raises LoadFailed."""
        fake = self._fake
        if fake.ignore_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        parts = max(1, min(100, round(fake.load_time / _PROGRESS_EVERY)))
        for part in range(1, parts + 1):
            if fake.load_time:
                self._sleep(fake.load_time / parts)
            if fake.die_in_load is not None and part == (parts + 1) // 2:
                os.kill(os.getpid(), fake.die_in_load)
            self._memory.hold(fake.bytes * part // parts)
            progress(part / parts)
        if fake.load_error is not None:
            raise LoadFailed(fake.load_error)
        return ModelInfo(
            context=min(_NATIVE_CONTEXT, self._settings.context or _DEFAULT_CONTEXT),
            slots=self._settings.slots,
            vocab_size=vocabulary.SIZE,
            chat_template=_CHATML,
            eos_token=vocabulary.END_OF_TURN,
            control_tokens=list(vocabulary.CONTROL_TOKENS),
            capabilities=(GENERATE, EMBED, RERANK),
            embedding_size=vectors.SIZE,
            details={"description": "fake", "bytes": fake.bytes},
        )

    def close(self) -> None:
        self._sleep(self._fake.unload_time)
        while self._fake.hang_in_unload:
            self._sleep(_HANG)
        self._memory.free()

    # --- text -------------------------------------------------------------------------------------------------

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        del add_special  # there is no BOS
        return vocabulary.tokenize(text, parse_special=parse_special)

    def tokenize_spans(self, text: str, literals: list[tuple[int, int]]) -> list[int]:
        """Token ids of a rendered chat: control tokens are parsed outside the character spans of ``literals``."""
        return vocabulary.tokenize(text, parse_special=True, literals=literals)

    def tokenize_continuation(self, text: str) -> list[int]:
        return vocabulary.tokenize(text, parse_special=False)

    def tokenize_input(self, text: str, *, query: str | None) -> list[int]:
        return vocabulary.tokenize((query or "") + text, parse_special=False)

    def detokenize(self, tokens: list[int]) -> bytes:
        """Raises InvalidRequest for an id that is not in the vocabulary."""
        return vocabulary.detokenize(tokens)

    def grammar_vocabulary(self) -> GrammarVocabulary:
        """Its answers are scripts: to bend them would hide what was asked for."""
        raise InvalidRequest("the fake backend follows no grammar")

    # --- the batch --------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Let ``sequence`` join. Raises InvalidRequest when its prompt has a bad script; nothing was added then."""
        prompt = sequence.prompt_text or self.detokenize(sequence.prompt).decode("utf-8", "replace")
        script = parse(prompt)
        if script.die_at == 0:
            os.kill(os.getpid(), script.signal)
        now = self._clock()
        events = answer(
            sequence, script, prompt, ended=self._ended.append, spins=self._begin_to_spin.append, sleep=self._sleep
        )
        if sequence.scores is not None:
            events = scored(events, sequence, script)
        latency = self._fake.token_latency if script.token_latency is None else script.token_latency
        run = _Run(sequence, events, latency=latency, first_at=now + self._fake.ttft)
        run.prefill_left, run.prefill_latency = script.prefill_steps, script.prefill_latency
        sequence.state = run
        if run.prefill_left:
            self._wait(run, now + run.prefill_latency)
        elif self._fake.ttft or latency:
            self._wait(run, run.first_at)
        else:
            self._flat_out[sequence] = events

    def remove(self, sequence: Sequence) -> None:
        self._spinning.discard(sequence)
        run = sequence.state
        if not isinstance(run, _Run):
            return
        sequence.state = None
        if self._flat_out.pop(sequence, None) is not None:
            return
        lane = self._lanes.get(run.latency)
        if lane is not None and lane.members.pop(sequence, None) is not None:
            if not lane.members:
                del self._lanes[run.latency]
            return
        self._waiting = [entry for entry in self._waiting if entry[2] is not run]
        heapq.heapify(self._waiting)

    @property
    def poll_interval(self) -> float | None:
        """Seconds until something is due: 0 when it is due now, None when nothing runs."""
        if self._flat_out or self._spinning:
            return 0.0
        due = [lane.due for lane in self._lanes.values()]
        if self._waiting:
            due.append(self._waiting[0][0])
        return max(0.0, min(due) - self._clock()) if due else None

    def step(self) -> list[Event]:
        """What is due now: one token of each sequence whose time has come. Never sleeps (a scripted hang does)."""
        if self._ended:
            for sequence in self._ended:
                self.remove(sequence)
            self._ended.clear()
        produced = list(map(next, self._flat_out.values()))
        if self._waiting or self._lanes:
            now = self._clock()
            self._advance_waiting(now, produced)
            self._advance_lanes(now, produced)
        if self._begin_to_spin:
            produced = [event for event in produced if event.sequence not in self._begin_to_spin]
            for sequence in self._begin_to_spin:
                self.remove(sequence)
                self._spinning.add(sequence)
            self._begin_to_spin.clear()
        return produced

    def _advance_waiting(self, now: float, produced: list[Event]) -> None:
        due: list[_Run] = []
        while self._waiting and self._waiting[0][0] <= now:
            due.append(heapq.heappop(self._waiting)[2])
        for run in due:
            if run.started:
                self._lanes.setdefault(run.latency, _Lane(now)).members[run.sequence] = run.events
                continue
            run.prefill_left = max(0, run.prefill_left - 1)
            if run.prefill_left:
                self._wait(run, now + run.prefill_latency)
            elif now < run.first_at:
                self._wait(run, run.first_at)
            else:
                produced.append(next(run.events))
                self._join_lane(run, now)

    def _join_lane(self, run: _Run, now: float) -> None:
        """After its first token. A lane that is already going is joined at its first step a whole latency later, so
        that two tokens are never closer than the latency.
        """
        run.started = True
        if run.latency == 0:
            self._flat_out[run.sequence] = run.events
        elif run.latency in self._lanes:
            self._wait(run, now + run.latency)
        else:
            lane = self._lanes[run.latency] = _Lane(now + run.latency)
            lane.members[run.sequence] = run.events

    def _advance_lanes(self, now: float, produced: list[Event]) -> None:
        for latency, lane in self._lanes.items():
            if lane.due <= now:
                produced += map(next, lane.members.values())
                lane.due += latency  # by the plan and not by now, so that lateness does not add up
                if lane.due <= now:
                    lane.due = now + latency  # steps that were missed are not made up

    def _wait(self, run: _Run, due: float) -> None:
        heapq.heappush(self._waiting, (due, next(self._order), run))
