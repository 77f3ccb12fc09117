"""A client that goes away, wherever its request is and however it goes: the engine stops and the slot is free."""

from __future__ import annotations

import json
import socket
import struct

import pytest

from tests.serving import COMPLETIONS, Pending, ServerProcess, fake, script, wait_until

ENDLESS = script(token_latency=0.01)
LONG_PREFILL = script(prefill_steps=100_000, prefill_latency=0.01)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A server with one slot, so that whoever still holds it is in the next one's way."""
    with ServerProcess(tmp_path_factory.mktemp("single"), fake(slots=1, context=1_000_000)) as process:
        yield process.wait_ready()


def close(pending: Pending) -> None:
    pending.close()


def reset(pending: Pending) -> None:
    pending.reset()


def half_close(pending: Pending) -> None:
    pending.sock.shutdown(socket.SHUT_WR)


def cancelled(server):
    return server.metric("requests_total", model="fake", outcome="cancelled")


def assert_stopped(server, before: float, count: int = 1) -> None:
    """The request was counted as cancelled, nothing runs, and the engine makes no tokens any more."""
    server.wait_metric(before + count, "requests_total", model="fake", outcome="cancelled")
    server.wait_idle()
    assert server.metric("inflight_requests", model="fake") == 0
    tokens = server.replica()["tokens"]
    assert server.complete("hi", max_tokens=3).status == 200
    assert server.replica()["tokens"] == tokens + 3


@pytest.mark.parametrize("leave", [close, reset, half_close])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_in_mid_answer_stops_the_engine(single, leave, stream):
    before, tokens = cancelled(single), single.replica()["tokens"]
    pending = single.begin(ENDLESS, stream=stream, max_tokens=900_000)
    wait_until(lambda: single.replica()["tokens"] > tokens + 5, "tokens come")
    leave(pending)
    assert_stopped(single, before)


@pytest.mark.parametrize("leave", [close, reset])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_during_prefill_stops_it(single, leave, stream):
    before = cancelled(single)
    pending = single.begin(LONG_PREFILL, stream=stream)
    single.wait_sequences(1)
    leave(pending)
    assert_stopped(single, before)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_it_queues_never_costs_the_engine_anything(single, stream):
    before = cancelled(single)
    running = single.begin(ENDLESS, stream=True, max_tokens=900_000)
    single.wait_sequences(1)
    waiting = single.begin(script(die_at=1), stream=stream)
    single.wait_queued(1)
    waiting.close()
    single.wait_queued(0)
    assert cancelled(single) == before + 1
    running.close()
    assert_stopped(single, before, 2)
    assert single.replica()["restarts"] == 0, "the script of the one that left would have killed the engine"


def test_all_sequences_of_a_request_are_cancelled(server):
    """The module's server has four slots; six prompts run, and wait, at once."""
    before = server.metric("requests_total", outcome="cancelled")
    pending = server.begin([ENDLESS] * 3, n=2, max_tokens=4000)
    server.wait_sequences(4)
    pending.close()
    assert_stopped(server, before)


def pipelined(server, count: int) -> socket.socket:
    body = json.dumps({"prompt": ENDLESS, "max_tokens": 900_000, "stream": True}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    return server.raw(request * count)


@pytest.mark.parametrize("count", [2, 40])
@pytest.mark.parametrize("linger", [None, 0])
def test_a_client_that_leaves_with_more_requests_in_the_pipe_is_noticed(single, count, linger):
    """What waits in the socket makes the server stop reading, so neither end-of-file nor reset is read."""
    before = cancelled(single)
    sock = pipelined(single, count)
    single.wait_sequences(1)
    if linger is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, linger))
    sock.close()
    wait_until(lambda: cancelled(single) > before, "the cancellation is counted")
    single.wait_idle()
    assert_stopped(single, cancelled(single), 0)


def test_a_client_that_has_sent_its_next_request_keeps_its_first_answer(single):
    body = json.dumps({"prompt": script(tokens=["a", "b"], token_latency=0.6)}).encode()
    request = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (COMPLETIONS.encode(), len(body), body)
    with single.raw(request * 3) as sock:
        data = b""
        while data.count(b'"text":"ab"') < 3:
            piece = sock.recv(65536)
            assert piece, data
            data += piece


def test_many_clients_that_leave_at_once_cost_nothing_but_their_own_requests(server):
    """Resets in the midst of fast streams; the log has no error, and the next request is answered."""
    before = server.metric("requests_total", outcome="cancelled")
    pending = [server.begin(ENDLESS, stream=place % 2 == 0, max_tokens=4000) for place in range(30)]
    server.wait_sequences(4)
    for place, one in enumerate(pending):
        one.reset() if place % 3 else one.close()
    server.wait_metric(before + 30, "requests_total", outcome="cancelled")
    server.wait_idle()
    for _ in range(20):
        with server.stream("hi", max_tokens=2000) as fast:
            fast.take(3)
    server.wait_idle()
    assert server.complete("hi", max_tokens=2).status == 200
    assert server.metric("requests_total", outcome="engine_error") == 0
    assert " ERROR " not in server.log
    assert "Traceback" not in server.log
    assert "never retrieved" not in server.log


def test_another_clients_arrival_cuts_nobody_off(server):
    with server.stream(script(tokens=["a"], repeat=40, token_latency=0.01), max_tokens=100) as first:
        first.take(1)
        others = [server.begin(script(tokens=["b"], repeat=5, token_latency=0.01)) for _ in range(6)]
        *chunks, done = first.events()
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a" * 39
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert [other.answer().text for other in others] == ["bbbbb"] * 6
