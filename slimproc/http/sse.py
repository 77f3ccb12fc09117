"""Server-sent events: token text in, finished bytes on a client's transport out, without waking a task per token.

A ring wake-up writes straight to the transport: once for each token while the engine is no faster than we are, once for
each stream when more than one frame was waiting.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from slimproc.ipc.wire import Tok
from slimproc.metrics import GapHistogram
from slimproc.stream import Flushable, TokenStream

KEEPALIVE: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"
MAX_UNREAD: Final = 1 << 20
"""Bytes written and not taken by the client. A reader who falls further behind is dropped."""

_json = msgspec.json.Encoder().encode


class EventClient:
    """One answer's connection. Holds bytes until the headers have gone out, then writes, then lets go for good."""

    __slots__ = ("_chunked", "_closed", "_held", "_transport", "_writes")

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._chunked = True
        self._held: list[bytes] = []
        self._closed = False
        self._writes = 0

    def attach(self, transport: asyncio.Transport, *, chunked: bool, prelude: bytes) -> None:
        """The headers are out: what was held goes after ``prelude``. ``chunked``: frame as HTTP/1.1 does."""
        held, self._held = self._held, []
        self._transport = transport
        self._chunked = chunked
        if prelude or held:
            self.write(b"".join((prelude, *held)))

    def write(self, events: bytes) -> None:
        """Write whole events. Never waits: past ``MAX_UNREAD`` the client is dropped, and its handler cancelled."""
        transport = self._transport
        if transport is None:
            if not self._closed:
                self._held.append(events)
            return
        if transport.is_closing():
            return
        transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)
        if transport.get_write_buffer_size() > MAX_UNREAD:
            transport.abort()

    def write_event(self, head: bytes, text: bytes, tail: bytes) -> None:
        """Write one event given in pieces, as a token's is. The hot path: one copy, and a look at the client's buffer
        only every 16th time.
        """
        transport = self._transport
        if transport is None or not self._chunked:
            self.write(head + text + tail)
            return
        try:
            transport.write(b"%x\r\n%b%b%b\r\n" % (len(head) + len(text) + len(tail), head, text, tail))
        except RuntimeError:  # closed in this turn: its handler is about to be cancelled
            return
        self._writes += 1
        if not self._writes & 15 and transport.get_write_buffer_size() > MAX_UNREAD:
            transport.abort()

    def close(self) -> None:
        """Nothing that comes from now on is written: a cancelled sequence may still have tokens on their way."""
        self._closed = True
        self._transport = None
        self._held.clear()


class EventStream(TokenStream):
    """One choice of a streamed answer. ``head`` and ``tail`` enclose a token's text as JSON to one whole event."""

    __slots__ = ("_client", "_finish_events", "_flushed_at_ns", "_gaps", "_head", "_seam", "_tail", "_texts")

    def __init__(
        self,
        index: int,
        client: EventClient,
        *,
        head: bytes,
        tail: bytes,
        finish_events: dict[int, bytes],
        gaps: GapHistogram,
    ) -> None:
        """``finish_events``: the closing event by ``Finish``. ``gaps`` takes the times between tokens."""
        super().__init__(index)
        self._client = client
        self._head = head
        self._tail = tail
        self._finish_events = finish_events
        self._seam = tail + head
        self._gaps = gaps
        self._texts: list[bytes] = []
        """JSON texts of the tokens that this wake-up has brought so far."""
        self._flushed_at_ns = 0

    def take(self, item: Tok, at_ns: int, gathering: list[Flushable] | None) -> None:
        if item.finish or not self.first_at_ns:
            self._take_end(item, at_ns)
            return
        if gathering is None:
            self._client.write_event(self._head, _json(item.text), self._tail)
            gap, gaps = at_ns - self.last_at_ns, self._gaps
            if gap == gaps.run_ns:
                gaps.repeats += 1
            else:
                gaps.begin(gap)
            self._flushed_at_ns = at_ns
        else:
            texts = self._texts
            if not texts:
                gathering.append(self)
            texts.append(_json(item.text))
        self.completion_tokens += item.tokens
        self.last_at_ns = at_ns

    def _take_end(self, item: Tok, at_ns: int) -> None:
        """The first item, the last, or both: these also tell admission."""
        self.flush()
        if self.first_at_ns and item.tokens:
            self._gaps.begin((at_ns - self.last_at_ns) // item.tokens, item.tokens)
        self._write_text(item)
        if item.finish and item.finish in self._finish_events:
            self._client.write(self._finish_events[item.finish])
        self._flushed_at_ns = at_ns
        self._note(item, at_ns)

    def _write_text(self, item: Tok) -> None:
        if item.text:
            self._client.write_event(self._head, _json(item.text), self._tail)

    @property
    def delivered(self) -> bool:
        return self.first_at_ns > 0

    def flush(self) -> None:
        """Write what this wake-up gathered, in one piece; one observation of its mean gap, weighted by its tokens."""
        texts = self._texts
        if not texts:
            return
        self._texts = []
        self._client.write_event(self._head, self._seam.join(texts), self._tail)
        self._gaps.begin((self.last_at_ns - self._flushed_at_ns) // len(texts), len(texts))
        self._flushed_at_ns = self.last_at_ns
