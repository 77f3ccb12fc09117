"""Passage: one admitted request that an upstream answers, from its place in the queue to its end.

It carries no body: the HTTP handler forwards that, inside ``held``, once there is a slot. Ends exactly once, in
``_settle``: whichever of finish, failure, deadline and ``close`` comes first.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from slimproc.admission.admitted import LONGEST_TIMER, OUTCOMES, Timeline, next_deadline
from slimproc.errors import BackendFailed, DeadlineExceeded, QueueTimeout, SlimprocError
from slimproc.replicas.life import AnySlot
from slimproc.request import NEVER, Deadline
from slimproc.upstream.slot import UpstreamSlot


class Forward(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked: that an upstream of ``model`` (the configured name) answers."""

    id: str
    model: str
    deadline: Deadline = NEVER
    queue_deadline: Deadline = NEVER
    """It is forwarded by then, or it is told that it waited too long."""


class Owner(Protocol):
    """The controller, as a passage sees it."""

    def wants_slot_again(self, request: Passage) -> None: ...
    def leave_queue(self, request: Passage) -> None: ...
    def ended(self, request: Passage) -> None: ...
    def may_go_elsewhere(self, request: Passage) -> bool: ...


class Passage:
    """``status``, ``bytes_in`` (of the body, from the client) and ``bytes_out`` are the handler's to fill in."""

    def __init__(self, request: Forward, owner: Owner) -> None:
        self.request = request
        self.times = Timeline(arrived=time.monotonic())
        self.outcome = ""
        self.error: SlimprocError | None = None
        self.engine_name = ""
        self.avoids = ""
        self.status: int | None = None
        self.bytes_in = 0
        self.bytes_out = 0
        self._owner = owner
        self._slot: UpstreamSlot | None = None
        self._changed = asyncio.Event()
        self._scope: asyncio.Timeout | None = None
        self._timer = self._set_timer()

    def __repr__(self) -> str:
        return f"<Passage {self.request.id} {self.outcome or ('forwarded' if self._slot else 'waiting')}>"

    # --- what the queue and the controller ask ------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """It has had a slot."""
        return self.times.granted > 0

    @property
    def unstarted(self) -> int:
        return 0 if self._slot is not None or self.outcome else 1

    @property
    def arrived(self) -> float:
        return self.times.arrived

    def grant(self, slot: AnySlot) -> None:
        """A slot of an upstream: its handler may forward it."""
        assert isinstance(slot, UpstreamSlot)
        self._slot = slot
        slot.on_lost = self._lose
        self.engine_name = slot.engine_name
        if not self.started:
            self.times.granted = time.monotonic()
        self._reset_timer()
        self._changed.set()

    # --- what the handler does ----------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """All of the handler's work on it. What ends it from outside breaks the work off and is raised here; what is
        raised inside ends it; and at the end it has ended.
        """
        try:
            async with asyncio.timeout(None) as scope:
                self._scope = scope
                try:
                    yield
                finally:
                    self._scope = None
        except TimeoutError:
            if self.error is None:
                raise
            raise self.error from None
        except SlimprocError as error:
            if self.error is not None and self.error is not error:
                raise self.error from None  # being broken off is what made the work fail
            self.fail(error)
            raise
        finally:
            self.close()

    async def wait_granted(self) -> UpstreamSlot:
        """Wait for a slot. Raises what failed."""
        while self._slot is None:
            if self.error is not None:
                raise self.error
            self._changed.clear()
            await self._changed.wait()
        return self._slot

    def try_another(self, error: SlimprocError) -> None:
        """The server could not be reached, and nothing of the request is used up: once, another replica may have it.

        Back to its old place; ``wait_granted`` says where it goes. Raises ``error`` when there is no other.
        """
        slot, self._slot = self._slot, None
        if slot is None:
            raise error
        self._give_back(slot, unreachable=error.message)
        if self.avoids or not self._owner.may_go_elsewhere(self):
            raise error
        self.avoids = self.engine_name
        self._reset_timer()
        self._owner.wants_slot_again(self)

    def close(self, outcome: str = "cancelled") -> None:
        """The handler is done with it: ``ok``, ``engine_error``, or its client has gone away. Nothing if it has ended."""
        if not self.outcome:
            self._settle(outcome)

    # --- ending -------------------------------------------------------------------------------------------------------

    def fail(self, error: SlimprocError) -> None:
        """End it, and break off what its handler is doing."""
        if not self.outcome:
            self.error = error
            self._settle(OUTCOMES.get(error.code, "engine_error"))

    def expire(self) -> None:
        """The deadline has passed, or the queue's while it had no slot."""
        if self._slot is None:
            self.fail(QueueTimeout("the request's time is over; it was waiting for its turn"))
        else:
            self.fail(DeadlineExceeded("the request's time is over; it was with the model's server"))

    def _reset_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._set_timer()

    def _set_timer(self) -> asyncio.TimerHandle | None:
        remaining = next_deadline(self.request, started=self._slot is not None) - time.monotonic()
        if remaining > LONGEST_TIMER:
            return None
        return asyncio.get_running_loop().call_later(max(0.0, remaining), self.expire)

    def _settle(self, outcome: str) -> None:
        self.outcome = outcome
        self.times.ended = time.monotonic()
        if self._timer is not None:
            self._timer.cancel()
        if self._scope is not None and self.error is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())
        self._owner.leave_queue(self)
        slot, self._slot = self._slot, None
        if slot is not None:
            self._give_back(slot)
        self._changed.set()
        self._owner.ended(self)

    def _give_back(self, slot: UpstreamSlot, *, unreachable: str = "") -> None:
        slot.on_lost = None
        if unreachable:
            slot.note_unreachable(unreachable)
        slot.release()

    def _lose(self, reason: str) -> None:
        """Its server is gone, or was ended."""
        self.fail(BackendFailed(f"the model's server is gone: {reason}"))
