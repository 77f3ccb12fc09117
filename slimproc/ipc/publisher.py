"""StepPublisher: how an engine's loop publishes steps and events without ever waiting for the front."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from slimproc.ipc import wire
from slimproc.ipc.backlog import Backlog

if TYPE_CHECKING:
    from slimproc.ipc.ring import RingWriter

STUCK_BYTES = 8 << 20
STUCK_SECONDS = 10.0
_POLL_MS = 100
_LONGEST_MESSAGE = 1000


def _nothing() -> None:
    pass


class StepPublisher:
    """One per ring, used by one thread.

    A full ring costs the front detail, never text: what does not fit is joined per sequence and tried again with the
    next step. With ``wait_for_room`` it waits instead, for a backend that is faster than any reader; ``on_wait`` is
    called at least every 100 ms meanwhile and may publish (which then only queues behind) or raise to end the wait.
    """

    def __init__(
        self,
        ring: RingWriter,
        *,
        wait_for_room: bool = False,
        on_wait: Callable[[], None] = _nothing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_wait = on_wait
        self._ring = ring
        self._put = ring.put
        self._commit = ring.commit
        self._largest = ring.max_payload
        self._wait_for_room = wait_for_room
        self._waiting = False
        self._clock = clock
        self._backlog = Backlog(ring.max_payload)
        self._entries = self._backlog.entries
        self._at_ns = 0

    def publish(self, step: wire.Step) -> None:
        """Publish one step of the whole batch. ``step`` may be reused afterwards."""
        if not self._entries:
            payload = wire.encode(step)
            try:
                if self._put(wire.STEP, payload):
                    self._commit()
                    return
            except ValueError:  # longer than a frame takes: it goes out in parts
                pass
            else:
                if self._wait_for_room:  # nothing joins it, so it need not be taken apart
                    self._backlog.add_step(payload, self._clock())
                    self._settle()
                    return
        self._at_ns = step.at_ns
        items = step.items if step.scored is None else [*step.scored, *step.items]
        self._ring.merged_tokens += self._backlog.add_items(items, self._clock())
        self._settle()

    def publish_event(self, event: wire.Event) -> None:
        """Publish one event, after everything of its sequence that was published before."""
        payload = wire.encode(event)
        if len(payload) > self._largest and isinstance(event, wire.Failed):
            payload = wire.encode(msgspec.structs.replace(event, message=event.message[:_LONGEST_MESSAGE] + " …"))
        if not self._entries and self._put(wire.EVENT, payload):
            self._commit()
            return
        self._backlog.add_event(event.rid, payload, self._clock())
        self._settle()

    @property
    def backlog(self) -> int:
        """Bytes that the front has not been told of, about."""
        return self._backlog.bytes + self._ring.debt

    def flush(self) -> bool:
        """Publish what fits now. True: nothing is left. False: try again when the ring's ``space_fd`` is readable."""
        backlog, ring = self._backlog, self._ring
        while self._entries and ring.fits(min(backlog.bytes, self._largest)):
            frame = backlog.next_frame(self._at_ns)
            if not ring.put(frame.kind, frame.payload):
                break
            backlog.drop(frame)
        ring.commit()
        return not self._entries and not ring.debt

    def stuck(self, now: float) -> bool:
        """The front is gone or hung: stop admitting and decoding. ``now`` is on the publisher's clock (seconds)."""
        if not self._entries:
            return False
        return self._backlog.bytes > STUCK_BYTES or now - self._backlog.oldest() > STUCK_SECONDS

    def _settle(self) -> None:
        if self.flush():
            return
        self._ring.full_hits += 1
        if not self._wait_for_room or self._waiting:
            return
        poll = select.poll()
        poll.register(self._ring.space_fd, select.POLLIN)
        self._waiting = True
        try:
            while not self.flush() and not self._ring.reader_gone:
                poll.poll(_POLL_MS)
                self.on_wait()
        finally:
            self._waiting = False
