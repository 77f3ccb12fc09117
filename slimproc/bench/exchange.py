"""Connection: one keep-alive HTTP connection that asks and times the answer. Events are counted, not parsed, while they come.

What is looked at more closely, after the end, is the last few kilobytes (``reading.py``): that keeps the client's cost
per token so low that it is not what is measured.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from time import perf_counter
from typing import Final, cast

from slimproc.bench.head import NO_HTTP, Head, HeadError, dechunk, parse_head

MARK: Final = b"\ndata:"
"""Begins an event: within one, JSON leaves no raw line end. In a chunk, the line of its size ends before it."""
_SEAM: Final = len(MARK) - 1
_END: Final = b"\r\n0\r\n\r\n"
_TRAILERS: Final = re.compile(rb"\r\n0\r\n(?:[!-~]+:[^\r\n]*\r\n)+\r\n\Z")
_TEXT: Final = re.compile(rb'"(?:text|content|reasoning|reasoning_content|arguments)"\s*:\s*"[^"]')
"""The first event with this is the first token. Quotes within a text are escaped, so that no text looks like it."""
SEAMS: Final = re.compile(rb"\A[0-9a-fA-F]+\r\n|\r\n[0-9a-fA-F]+\r\n")
"""What stands before the first chunk and between two."""
_KEEP: Final = 16 << 10
"""Bytes of a stream's end that are looked at."""
_TRIM: Final = 4 * _KEEP
_MOST_BEFORE: Final = 1 << 20
"""Bytes of a stream in which no text has come."""
_MOST: Final = 64 << 20
"""Bytes of an answer that is no stream."""
_MOST_HEAD: Final = 64 << 10


class Answer:
    """What one exchange has seen. Instants are ``perf_counter``'s; 0.0: it has not happened."""

    __slots__ = (
        "before",
        "body",
        "counts",
        "ended",
        "events",
        "fault",
        "first",
        "gaps",
        "head",
        "left",
        "sent",
        "streamed",
    )

    def __init__(self) -> None:
        self.head = Head()
        self.sent = self.first = self.ended = 0.0
        self.events = 0
        self.before = 0
        """Events before the first token: a role, a comment of the server's own."""
        self.gaps = array("d")
        """Seconds since the read before, of every read with events, the first token's (0.0) included."""
        self.counts = array("L")
        """Events of that read."""
        self.streamed = False
        self.left = False
        """The client went away, as it was told to."""
        self.fault = ""
        """Why there is no whole answer."""
        self.body = b""
        """The answer; of a stream its end, still in its chunks."""


class Connection(asyncio.Protocol):
    """One request at a time. ``usable`` says whether it may be asked again."""

    def __init__(self) -> None:
        self.usable = False
        self.used = False
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Answer] | None = None
        self._answer = Answer()
        self._recent = bytearray()
        self._counting = False
        self._spoke_unasked = False
        self._left_over = 0
        self._leave_after: int | None = None
        self._last = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.usable = True

    def ask(self, request: bytes, leave_after: int | None = None) -> asyncio.Future[Answer]:
        """Send; the future always gets an Answer, if need be with a ``fault``."""
        assert self._transport is not None
        assert self._waiter is None, "one request at a time"
        self.used = True
        self._answer = Answer()
        self._recent = bytearray()
        self._counting = False
        self._leave_after = leave_after
        self._waiter = asyncio.get_running_loop().create_future()
        waiter = self._waiter
        self._answer.sent = perf_counter()
        if self.usable:
            self._transport.write(request)
        else:  # it was lost before it could be asked anything
            self._fail_unanswered(None)
        return waiter

    def close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    # --- what comes -----------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        recent = self._recent
        if not self._counting:
            recent += data
            self._take_slowly()
            return
        now = perf_counter()
        start = len(recent) - _SEAM
        recent += data
        events = recent.count(MARK, start)
        if events:
            answer = self._answer
            answer.gaps.append(now - self._last)
            answer.counts.append(events)
            answer.events += events
            self._last = now
            if self._leave_after is not None and answer.events - answer.before >= self._leave_after:
                self._leave()
                return
        if len(recent) > _TRIM:
            del recent[:-_KEEP]
        if self._answer.head.chunked:
            if data.endswith(b"\n") and _ends(recent):
                self._finish()
        elif self._answer.head.length is not None:
            self._left_over -= len(data)
            if self._left_over <= 0:
                self._finish()

    def _take_slowly(self) -> None:
        """Before the first token, and for all of an answer that is no stream."""
        answer, recent = self._answer, self._recent
        if self._waiter is None:  # nobody asked
            self._spoke_unasked = True
            self.close()
            return
        if not answer.head.status:
            at = recent.find(b"\r\n\r\n")
            if at < 0:
                if len(recent) > _MOST_HEAD or not recent.startswith(b"HTTP/1."[: len(recent)]):
                    self._fail(NO_HTTP)
                return
            try:
                head = parse_head(bytes(recent[:at]))
            except HeadError as error:
                self._fail(str(error))
                return
            if head.status < 200:  # an interim answer
                del recent[: at + 4]
                self._take_slowly()
                return
            answer.head = head
            answer.streamed = head.status == 200 and head.events
            # The line end that is left is the one before the body's first event, where there are no chunks.
            del recent[: at + (3 if answer.streamed and not head.chunked else 4)]
            self._left_over = head.length or 0
        if answer.streamed:
            self._look_for_first()
        else:
            self._gather()

    def _look_for_first(self) -> None:
        answer, recent = self._answer, self._recent
        now = perf_counter()
        events: bytes | bytearray = recent
        found = _TEXT.search(events)
        if not found and answer.head.chunked:  # it may be cut by the border of two chunks
            events = SEAMS.sub(b"", recent)
            found = _TEXT.search(events)
        answer.events = events.count(MARK) + events.startswith(MARK[1:])
        if found:
            answer.before = events.count(MARK, 0, found.start()) + events.startswith(MARK[1:]) - 1
            answer.first = self._last = now
            answer.gaps.append(0.0)
            answer.counts.append(answer.events - answer.before)
            self._counting = True
            if self._leave_after is not None and answer.events - answer.before >= self._leave_after:
                self._leave()
                return
        elif len(recent) > _MOST_BEFORE:
            self._fail("1 MiB of events have no text")
            return
        self._see_end(len(recent) - (0 if answer.head.chunked else 1))

    def _gather(self) -> None:
        if len(self._recent) > _MOST:
            self._fail("the answer is larger than 64 MiB")
        else:
            self._see_end(len(self._recent))

    def _see_end(self, received: int) -> None:
        head = self._answer.head
        if head.chunked:
            if (self._answer.streamed and _ends(self._recent)) or (
                not self._answer.streamed
                and self._recent.endswith(b"\r\n\r\n")
                and dechunk(bytes(self._recent)) is not None
            ):
                self._finish()
        elif head.length is not None:
            if self._counting:
                self._left_over = head.length - received
            if received >= head.length:
                self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        if self._waiter is None:
            return
        head = self._answer.head
        if head.status and not head.chunked and head.length is None and exc is None:
            self._finish()  # such an answer ends with its connection
        elif head.status:
            self._fail(f"cut off{'' if exc is None else f': {exc}'}")
        else:
            self._fail_unanswered(exc)

    # --- the end --------------------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        self._answer.left = True
        self._resolve()
        self.close()

    def _fail_unanswered(self, exc: Exception | None) -> None:
        if self._spoke_unasked:
            self._fail(NO_HTTP)
        else:
            self._fail("closed without an answer" if exc is None else f"lost without an answer: {exc}")

    def _fail(self, fault: str) -> None:
        self._answer.fault = fault
        self._resolve()
        self.close()

    def _finish(self) -> None:
        head = self._answer.head
        body = bytes(self._recent)
        self._answer.body = body if self._answer.streamed or not head.chunked else dechunk(body) or b""
        self._resolve()
        if not head.keep_alive:
            self.close()

    def _resolve(self) -> None:
        self._answer.ended = perf_counter()
        if self._answer.streamed and not self._answer.body:
            self._answer.body = bytes(self._recent[-_KEEP:])
        waiter, self._waiter = self._waiter, None
        self._counting = False
        if waiter is not None and not waiter.done():
            waiter.set_result(self._answer)


def _ends(recent: bytearray) -> bool:
    """The last chunk is there, with or without trailers."""
    if recent.endswith(_END) or recent == b"0\r\n\r\n":
        return True
    return recent.endswith(b"\r\n\r\n") and _TRAILERS.search(recent, max(0, len(recent) - 4096)) is not None
