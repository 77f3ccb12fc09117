"""Clients that take their answers slowly or not at all: bounded memory, a free slot, and nobody else is hurt."""

from __future__ import annotations

import json
import socket

import psutil
import pytest

from tests.serving import fake, script, wait_until

LARGE = script(tokens=["x" * 4000], repeat=1_000_000)
"""Far more than the buffers of both kernels hold."""


def never_reads(server, prompt, **fields) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", server.port))
    body = json.dumps({"prompt": prompt, "max_tokens": 1_000_000, **fields}).encode()
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    return sock


def test_a_stream_that_nobody_reads_is_dropped_and_its_slot_freed(serve):
    server = serve(fake(slots=2, context=1_000_000))
    front = psutil.Process(server.process.pid)
    with server.stream(script(tokens=["y"], repeat=300, token_latency=0.01), max_tokens=1000) as other:
        other.take(1)
        before = front.memory_info().rss
        deaf = [never_reads(server, LARGE, stream=True) for _ in range(4)]
        server.wait_metric(4, "requests_total", outcome="cancelled")
        assert front.memory_info().rss - before < 64 << 20
        *chunks, done = other.events()
    assert (chunks[-1]["choices"][0]["finish_reason"], done) == ("stop", "[DONE]")
    assert sum(len(chunk["choices"][0]["text"]) for chunk in chunks) == 299
    for sock in deaf:
        sock.close()
    assert server.complete("hi", max_tokens=1).status == 200
    assert "Traceback" not in server.log


def test_a_reader_that_pauses_within_the_buffers_loses_nothing(server):
    with server.stream("hi", max_tokens=2000) as reader:
        reader.take(1)
        server.wait_idle()
        *chunks, done = reader.events()
    assert done == "[DONE]"
    assert sum(" tok" in chunk["choices"][0]["text"] for chunk in chunks) == 1999


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_paused_reader_with_forty_requests_in_the_pipe_that_leaves_is_noticed(serve, stream):
    server = serve(fake(slots=1, context=1_000_000))
    body = json.dumps({"prompt": script(token_latency=0.005), "max_tokens": 900_000, "stream": stream}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    sock = server.raw(request * 40)
    server.wait_sequences(1)
    sock.close()
    wait_until(lambda: server.metric("requests_total", outcome="cancelled") >= 1, "the running one is cancelled")
    server.wait_idle()
    assert server.complete("hi", max_tokens=1).status == 200


def test_a_client_that_takes_nothing_of_a_joined_answer_holds_no_slot(serve):
    server = serve(fake(slots=1, context=1_000_000))
    sock = never_reads(server, script(tokens=["x" * 4000], repeat=2000))
    server.wait_metric(1, "requests_total", outcome="ok")
    assert server.complete("hi", max_tokens=1).status == 200
    sock.close()


@pytest.mark.slow
def test_a_client_that_takes_nothing_of_a_joined_answer_is_dropped_in_the_end(serve):
    server = serve(fake(slots=1, context=1_000_000))
    front = psutil.Process(server.process.pid)
    sock = never_reads(server, script(tokens=["x" * 4000], repeat=2000))
    server.wait_metric(1, "requests_total", outcome="ok")

    def connected() -> bool:
        port = sock.getsockname()[1]
        return any(other.raddr and other.raddr.port == port for other in front.net_connections("inet"))

    assert connected()
    wait_until(lambda: not connected(), "its connection is closed", limit=60)
    sock.close()
