"""The bytes of slimproc's own completion events, made by its own templates, for servers that only write them."""

from __future__ import annotations

import msgspec

from slimproc.http.openai.format import CompletionFormat
from slimproc.http.sse import DONE
from slimproc.request import Finish, GenerateRequest

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
    b"X-Accel-Buffering: no\r\nx-request-id: 0123456789abcdef0123456789abcdef\r\nTransfer-Encoding: chunked\r\n"
    b"Date: Mon, 01 Jan 2024 00:00:00 GMT\r\nServer: Python/3.11 aiohttp/3.14.0\r\n\r\n"
)
"""As long as the headers that slimproc sends."""
_json = msgspec.json.Encoder().encode


def text(position: int) -> str:
    """The fake backend's token at ``position``, from 0."""
    return f" tok{position}"


def chunk(events: bytes) -> bytes:
    """As HTTP/1.1 frames it."""
    return b"%x\r\n%b\r\n" % (len(events), events)


def token_chunks(tokens: int, per_write: int) -> list[bytes]:
    """An answer of ``tokens`` tokens as the chunks of its writes, ``per_write`` tokens in each (fewer in the last)."""
    answer = CompletionFormat(GenerateRequest(id="bench", model="fake", prompts=["x"]))
    head, tail = answer.head_and_tail(0)
    events = [head + _json(text(position)) + tail for position in range(tokens)]
    return [chunk(b"".join(events[at : at + per_write])) for at in range(0, tokens, per_write)]


def end_chunks() -> bytes:
    """What ends an answer: the closing event, ``[DONE]``, and the last chunk."""
    answer = CompletionFormat(GenerateRequest(id="bench", model="fake", prompts=["x"]))
    return chunk(answer.finish_events(0)[int(Finish.LENGTH)]) + chunk(DONE) + b"0\r\n\r\n"
