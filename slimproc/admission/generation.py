"""Generation: one admitted request from its place in the queue to its end: slots, rendering, deadline, outcome.

The HTTP handler's own task does the waiting, so a client that goes away cancels exactly what it asked for. Ends
exactly once, in ``_settle``: whichever of finish, failure, deadline and ``close`` comes first.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from slimproc import logs
from slimproc.admission.admitted import LONGEST_TIMER, OUTCOMES, Timeline, next_deadline
from slimproc.admission.fit import refusal
from slimproc.chat.templates import Rendered
from slimproc.errors import (
    DeadlineExceeded,
    EngineCrashed,
    EngineCrashedTwice,
    InternalError,
    QueueTimeout,
    SlimprocError,
)
from slimproc.ipc import wire
from slimproc.replicas.life import AnySlot
from slimproc.replicas.slot import Slot
from slimproc.request import ChatPrompt, EmbedRequest, Prompt, Work
from slimproc.stream import TokenStream

log = logs.get("slimproc.generation")

Render = Callable[[str, wire.ModelInfo, ChatPrompt], Awaitable[Rendered]]
"""Renders a chat for a configured model that is loaded."""


class Owner(Protocol):
    """The controller, as a generation sees it."""

    def wants_slot_again(self, generation: Generation) -> None: ...
    def leave_queue(self, generation: Generation) -> None: ...
    def ended(self, generation: Generation) -> None: ...
    def note_fatal(self, generation: Generation, death: int) -> None:
        """Its engine died while it was inside the native call."""

    def began(self, generation: Generation) -> None:
        """It has given its first text, or the first in another engine."""

    def is_poison(self, generation: Generation) -> bool: ...


class Generation:
    """``streams`` has one entry per sequence, in the order of the answer's choices."""

    def __init__(self, request: Work, streams: Sequence[TokenStream], owner: Owner, render: Render) -> None:
        assert len(streams) == request.sequences
        self.request = request
        self.streams = list(streams)
        self.times = Timeline(arrived=time.monotonic())
        self.error: SlimprocError | None = None
        self.outcome = ""
        self.engine_name = ""
        self._owner = owner
        self._render_chat = render
        self._rendered: Rendered | None = None
        self._unstarted = deque(range(len(streams)))
        self._slots: dict[int, Slot] = {}
        self._replayed: set[int] = set()
        self.resumed = 0
        """Times that one of its streams went on in another engine."""
        self._unfinished = len(streams)
        self._changed = asyncio.Event()
        for stream in streams:
            stream.on_first = self._on_first
            stream.on_end = self._on_end
        self._timer = self._set_timer()
        self._rendering: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Generation {self.request.id} {self.outcome or ('running' if self.started else 'waiting')}>"

    # --- what the queue and the controller ask ----------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """It has had a slot."""
        return self.times.granted > 0

    @property
    def unstarted(self) -> int:
        return len(self._unstarted)

    @property
    def next_prompt(self) -> Prompt:
        """Of the sequence that the next slot is for."""
        return self.request.prompts[self._unstarted[0] // self.request.n]

    @property
    def arrived(self) -> float:
        return self.times.arrived

    avoids = ""

    def sequences_in(self, engine: object) -> int:
        """Slots that it has of one engine."""
        return sum(slot.is_of(engine) for slot in self._slots.values())

    def grant(self, slot: AnySlot) -> None:
        """An engine's slot for the next sequence. Starts it now, unless its chat has to be rendered first."""
        assert isinstance(slot, Slot)
        index = self._unstarted.popleft()
        self._slots[index] = slot
        if not self.started:
            self.times.granted = time.monotonic()
            if self.request.queue_deadline.at < self.request.deadline.at:
                self._stop_timer()
                self._timer = self._set_timer()
            if (misfit := refusal(self.request, slot.model)) is not None:
                self.fail(misfit)
                return
        if not self._needs_rendering:
            self._start(index)
        elif self._rendering is None:
            self._rendering = asyncio.create_task(self._render(slot.model), name=f"render {self.request.id}")

    # --- what the handler awaits --------------------------------------------------------------------------------------

    async def wait_started(self, limit: float | None) -> bool:
        """Wait for the first text or the end, at most ``limit`` seconds; True when it is there. Raises what failed."""
        return await self._wait(lambda: self.times.first_text > 0 or self._unfinished == 0, limit)

    async def wait_finished(self, limit: float | None = None) -> bool:
        """Wait until every sequence has ended, at most ``limit`` seconds. Raises what failed."""
        return await self._wait(lambda: self._unfinished == 0, limit)

    async def _wait(self, condition: Callable[[], bool], limit: float | None) -> bool:
        try:
            async with asyncio.timeout(limit):
                while self.error is None and not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        if self.error is not None:
            raise self.error
        return True

    def close(self) -> None:
        """The handler leaves, for whatever reason. What is unfinished is cancelled: its client has gone away."""
        if not self.outcome:
            self._settle("cancelled")

    # --- starting -----------------------------------------------------------------------------------------------------

    @property
    def _needs_rendering(self) -> bool:
        return self._rendered is None and isinstance(self.request.prompts[0], ChatPrompt)

    async def _render(self, model: wire.ModelInfo) -> None:
        """A task of its own, which ``_settle`` cancels: a handler that wakes to keep its stream open must not begin the
        rendering anew, and who waits for the renderer past the deadline waits no longer.
        """
        chat = self.request.prompts[0]
        assert isinstance(chat, ChatPrompt)
        try:
            self._rendered = await self._render_chat(self.request.model, model, chat)
        except SlimprocError as error:
            self.fail(error)
        except Exception:  # a bug of ours: told like any other, for nobody awaits this task
            log.exception("a chat could not be rendered", request_id=self.request.id)
            self.fail(InternalError("a chat could not be rendered"))
        else:
            for index in list(self._slots):
                self._start(index)

    def _start(self, index: int) -> None:
        slot, stream = self._slots[index], self.streams[index]
        self.engine_name = slot.engine_name
        slot.start(stream, lambda rid: self._submit(rid, index))

    def _submit(self, rid: int, index: int) -> wire.Start:
        request = self.request
        if isinstance(request, EmbedRequest):
            return _embed(request, rid, index)
        which, choice = divmod(index, request.n)
        prompt = request.prompts[which]
        chat = isinstance(prompt, ChatPrompt)
        literals: list[tuple[int, int]] = []
        if isinstance(prompt, ChatPrompt):
            assert self._rendered is not None
            prompt, literals = self._rendered.text, self._rendered.literals
        sampling = request.sampling
        if sampling.seed is not None and choice:
            # Equal seeds would make the choices of ``n`` the same text.
            sampling = msgspec.structs.replace(sampling, seed=(sampling.seed + choice) % 2**63)
        return wire.Submit(
            rid=rid,
            prompt=prompt,
            literals=literals,
            chat=chat,
            max_tokens=request.max_tokens,
            stop=request.stop,
            echo=request.echo,
            logprobs=request.logprobs,
            sampling=sampling,
            grammar=request.grammar,
            said=self.streams[index].said,
        )

    # --- ending -------------------------------------------------------------------------------------------------------

    def _on_first(self, stream: TokenStream) -> None:
        self._owner.began(self)
        if not self.times.first_text:
            self.times.first_text = stream.first_at_ns / 1e9
            self._changed.set()

    def _on_end(self, stream: TokenStream) -> None:
        index = stream.index
        self._slots.pop(index, None)
        if stream.error is None:
            self._unfinished -= 1
            if self._unfinished == 0:
                self._settle("ok")
            return
        if isinstance(stream.error, EngineCrashed) and stream.error.inside_of is not None:
            self._owner.note_fatal(self, stream.error.inside_of)
            if self.outcome:
                return
        if isinstance(stream.error, EngineCrashed) and self._owner.is_poison(self):
            self.fail(EngineCrashedTwice(stream.error.message))
        elif self._may_replay(stream):
            self._replayed.add(index)
            stream.reset()
            if not any(other.first_at_ns or other.said is not None for other in self.streams):
                self.times.first_text = 0.0
            self._try_again(index)
        elif isinstance(stream.error, EngineCrashed) and stream.delivered and stream.go_on():
            self.resumed += 1
            self._try_again(index)
        else:
            self.fail(stream.error)

    def _may_replay(self, stream: TokenStream) -> bool:
        """Its engine died, and it has given its client no byte yet: once more, on whatever engine comes next."""
        return isinstance(stream.error, EngineCrashed) and not stream.delivered and stream.index not in self._replayed

    def _try_again(self, index: int) -> None:
        self._unstarted.appendleft(index)
        self._owner.wants_slot_again(self)

    def fail(self, error: SlimprocError) -> None:
        """End the whole request: an answer of which one choice failed is no answer."""
        if not self.outcome:
            self.error = error
            self._settle(OUTCOMES.get(error.code, "engine_error"))

    def expire(self) -> None:
        """The deadline has passed, or the queue's while it had no slot."""
        if not self.started:
            self.fail(QueueTimeout("the request's time is over; it was waiting for a slot"))
            return
        where = "generating" if self.times.first_text else "in prefill"
        self.fail(DeadlineExceeded(f"the request's time is over; it was {where}"))

    def _set_timer(self) -> asyncio.TimerHandle | None:
        remaining = next_deadline(self.request, started=self.started) - time.monotonic()
        if remaining > LONGEST_TIMER:
            return None
        return asyncio.get_running_loop().call_later(max(0.0, remaining), self.expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _settle(self, outcome: str) -> None:
        self.outcome = outcome
        self.times.ended = time.monotonic()
        self.times.last_text = max((stream.last_at_ns for stream in self.streams), default=0) / 1e9
        self._stop_timer()
        if self._rendering is not None:
            self._rendering.cancel()
        for stream in self.streams:
            stream.on_first = stream.on_end = None
        self._owner.leave_queue(self)
        for slot in self._slots.values():
            slot.cancel()
        self._slots.clear()
        self._unstarted.clear()
        self._changed.set()
        self._owner.ended(self)


def _embed(request: EmbedRequest, rid: int, index: int) -> wire.Embed:
    prompt = request.prompts[index]
    assert not isinstance(prompt, ChatPrompt)
    return wire.Embed(
        rid=rid, prompt=prompt, name=request.names[index], query=request.query, dimensions=request.dimensions
    )
