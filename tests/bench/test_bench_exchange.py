"""A connection counts the events of an answer, however the bytes are cut, and knows where an answer ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimproc.bench.exchange import Answer, Connection
from slimproc.bench.head import HeadError, dechunk, parse_head
from slimproc.bench.sample import between_tokens, read
from tests.bench.conftest import END, chunk, event, head, said, usage


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True


def take(*parts: bytes, closed: bool = False, leave_after: int | None = None) -> Answer:
    """What a connection makes of these reads."""

    async def work() -> Answer:
        connection = Connection()
        wire = Wire()
        connection.connection_made(wire)
        waiting = connection.ask(b"?", leave_after)
        for part in parts:
            if not waiting.done():
                connection.data_received(part)
        if closed:
            connection.connection_lost(None)
        assert waiting.done(), "the end was not seen"
        return waiting.result()

    return asyncio.run(work())


def sampled(answer: Answer, *, stream: bool = True):
    found = read(answer, number=0, intended=answer.sent, began=answer.sent, stream=stream)
    between_tokens(found)
    return found


def halves(data: bytes) -> tuple[bytes, bytes]:
    return data[: len(data) // 2], data[len(data) // 2 :]


TEXTS = ["Hello", ' "text":"x', "\ndata: no", " 0\r\n\r\n", "é", "data:"]
ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
CHAT = [ROLE, *({"choices": [{"index": 0, "delta": {"content": text}}]} for text in TEXTS)]
CHAT += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]
WHOLE = (
    head() + b"".join(chunk(event(one)) for one in CHAT) + chunk(b": keep-alive\n\n") + chunk(b"data: [DONE]\n\n") + END
)


@given(cuts=st.lists(st.integers(0, len(WHOLE)), max_size=30))
@settings(max_examples=300, deadline=None)
def test_tokens_are_counted_the_same_however_an_answer_is_cut(cuts):
    """The role's event, the finish reason and [DONE] are no tokens, and no text looks like an event or like the end."""
    edges = sorted({0, len(WHOLE), *cuts})
    answer = take(*(WHOLE[a:b] for a, b in itertools.pairwise(edges)))

    found = sampled(answer)

    assert (found.outcome, found.tokens, found.tokens_by) == ("ok", len(TEXTS), "events")
    assert found.events == len(CHAT) + 1
    assert found.ttft is not None
    assert 0 <= found.ttft <= found.latency
    assert len(answer.gaps) == len(answer.counts)


def test_byte_by_byte_is_one_way_to_cut_it():
    found = sampled(take(*(WHOLE[at : at + 1] for at in range(len(WHOLE)))))
    assert (found.outcome, found.tokens) == ("ok", len(TEXTS))


def test_tokens_are_those_of_the_usage_where_there_is_one():
    found = sampled(take(head(), *(chunk(event(one)) for one in (said("a"), said("b", "length"), usage(7, 5, 3))), END))
    assert (found.tokens, found.tokens_by, found.prompt_tokens, found.cached_tokens) == (7, "usage", 5, 3)


@pytest.mark.parametrize("wrong", [-1, "7", True, None, 1.5, 1 << 60])
def test_a_usage_that_is_no_count_is_not_believed(wrong):
    found = sampled(take(head(), *(chunk(event(one)) for one in (said("a", "stop"), usage(wrong))), END))
    assert (found.tokens, found.tokens_by) == (1, "events")


def test_events_that_came_in_one_read_have_no_time_between_them():
    first, joined = chunk(event(said("a"))), chunk(event(said("b")) + event(said("c")) + event(said("d")))
    end = chunk(event(said("", "stop"))) + chunk(b"data: [DONE]\n\n") + END

    found = sampled(take(head() + first, joined, end))

    assert found.tokens == 4
    assert found.itl_p50 == 0.0
    assert found.itl_max > 0
    assert found.itl_mean == pytest.approx(found.itl_max / 3)


def test_the_times_of_closing_events_are_no_times_between_tokens():
    answer = take(head(), chunk(event(said("a"))), chunk(event(said("", "stop"))), chunk(b"data: [DONE]\n\n"), END)
    found = sampled(answer)
    assert found.tokens == 1
    assert found.itl_max is None


def test_a_long_stream_keeps_only_its_end():
    tokens = [chunk(event(said(f"{number:0100}"))) for number in range(3000)]
    answer = take(head(), *tokens, chunk(event(said("", "length"))), chunk(event(usage(3000))), END)
    found = sampled(answer)
    assert (found.outcome, found.tokens, found.events) == ("ok", 3000, 3002)
    assert len(answer.body) < 100_000


@pytest.mark.parametrize(
    ("parts", "closed"),
    [
        (
            [b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", event(said("a")), event(said("b", "stop"))],
            True,
        ),
        ([head(), chunk(event(said("a"))), chunk(event(said("b", "stop"))), b"0\r\nX-Sum: 1\r\n\r\n"], False),
        ([head(), *(chunk(half) for one in (said("a"), said("b", "stop")) for half in halves(event(one))), END], False),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" + head(), chunk(event(said("a")) + event(said("b", "stop"))), END], False),
    ],
    ids=["ended by the connection", "with trailers", "half an event a chunk", "after an interim answer"],
)
def test_a_stream_may_be_framed_in_any_way_of_http(parts, closed):
    found = sampled(take(*parts, closed=closed))
    assert found.outcome == "ok"
    assert found.ttft is not None


def test_a_stream_of_known_length_ends_there():
    body = event(said("a")) + event(said("b", "stop"))
    top = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(body)
    for at in range(1, len(body)):
        found = sampled(take(top + body[:at], body[at:]))
        assert (found.outcome, found.tokens, found.events) == ("ok", 2, 2), at


@pytest.mark.parametrize(
    ("parts", "kind", "detail"),
    [
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], "what answers speaks no HTTP/1.1", ""),
        ([b"HTTP/1.1 banana\r\n\r\n"], "what answers speaks no HTTP/1.1", "banana"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: -4\r\n\r\n"], "an answer has a Content-Length of '-4'", ""),
        ([b"x" * 70_000], "what answers speaks no HTTP/1.1", ""),
        ([b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70_000], "what answers speaks no HTTP/1.1", ""),
        ([head("text/html"), chunk(b"<html>"), END], "not SSE", "text/html"),
        ([head(), chunk(event({"error": {"message": "it\nbroke"}})), END], "error event", "it broke"),
        ([head(), chunk(event(said("a"))), chunk(event({"error": "gone"})), END], "error event", "gone"),
        ([head(), chunk(event(said("a"))), END], "unfinished", "1 events"),
        ([head(), END], "no events", ""),
    ],
)
def test_what_is_no_answer_is_an_error_of_a_telling_kind(parts, kind, detail):
    found = sampled(take(*parts))
    assert found.outcome == "error"
    assert found.kind.startswith(kind)
    assert detail in found.detail


def test_an_answer_that_is_cut_off_keeps_what_was_seen_of_it():
    found = sampled(take(head(), chunk(event(said("a"))), chunk(event(said("b"))), closed=True))
    assert (found.outcome, found.kind, found.tokens) == ("error", "cut off", 2)


def test_the_client_leaves_after_the_events_that_it_was_told():
    answer = take(head(), *(chunk(event(said(str(number)))) for number in range(10)), leave_after=3)
    found = sampled(answer)
    assert (found.outcome, found.tokens) == ("cancelled", 3)


@pytest.mark.parametrize("body", [b"[]", b"{}", b'{"choices": 1}', b"\xff", b"[" * 100_000, b""])
def test_a_whole_answer_that_is_no_completion_is_malformed(body):
    top = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert sampled(take(top + body), stream=False).kind == "malformed"


@given(body=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=5))
def test_chunks_come_together_to_the_body_and_half_of_them_to_nothing(body, cuts):
    edges = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    framed = b"".join(chunk(body[a:b]) for a, b in itertools.pairwise(edges)) + END
    assert dechunk(framed) == body
    assert dechunk(framed[:-4]) is None


@given(st.binary(max_size=300))
def test_any_bytes_are_a_head_or_a_head_error(data):
    with contextlib.suppress(HeadError):
        assert 100 <= parse_head(data).status < 600


@given(st.lists(st.binary(max_size=60), max_size=8), st.booleans())
@settings(deadline=None)
def test_whatever_follows_a_head_ends_as_some_outcome(parts, chunked):
    """Nothing that a server sends makes the generator raise."""
    top = head() if chunked else b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    found = sampled(take(top, *(part for part in parts if part), closed=True))
    assert found.outcome in ("ok", "error")
