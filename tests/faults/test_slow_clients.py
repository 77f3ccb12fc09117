"""Clients that do not take their answer, or leave in the midst of anything: their fault stays their own."""

from __future__ import annotations

import json
import socket
import struct

from tests.faults.leftovers import Leftovers, ended_once
from tests.serving import fake, script, wait_until

LARGE = script(tokens=["x" * 4000], repeat=1_000_000)
"""Far more than the buffers of both kernels hold."""


def request(prompt, **fields) -> bytes:
    body = json.dumps({"prompt": prompt, **fields}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_a_stream_that_nobody_reads_ends_once_as_cancelled_and_its_slot_goes_to_who_waits(serve):
    server = serve(fake(slots=1, context=1_000_000) | {"log_json": True})
    leftovers = Leftovers(server)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", server.port))
    sock.sendall(request(LARGE, max_tokens=1_000_000, stream=True))
    server.wait_sequences(1)
    assert server.complete(script(tokens=["served"])).text == "served"
    ended_once(server, 2)
    assert len(server.records("generation finished", outcome="cancelled")) == 1
    sock.close()
    leftovers.assert_none()


def test_a_reset_after_every_byte_of_a_request_costs_that_request_and_leaves_no_trace(serve):
    server = serve(fake(slots=2, context=1_000_000))
    leftovers = Leftovers(server)
    whole = request(script(token_latency=0.01), max_tokens=900_000, stream=True)
    for length in range(len(whole) + 1):
        reset(server.raw(whole[:length]))
    leftovers.assert_none()
    assert server.metric("requests_total", outcome="engine_error") == 0
    assert " ERROR " not in server.log


def test_a_reset_after_every_byte_of_an_answer_cancels_it_and_frees_its_slot(serve):
    server = serve(fake(slots=2, context=1_000_000))
    leftovers = Leftovers(server)
    whole = request(script(token_latency=0.002), max_tokens=900_000, stream=True)
    lengths = range(1, 600)
    for length in lengths:
        sock = server.raw(whole)
        left = length
        while left > 0:
            left -= len(sock.recv(left))
        reset(sock)
    wait_until(
        lambda: server.metric("requests_total", outcome="cancelled") == len(lengths), "each was cancelled, and once"
    )
    leftovers.assert_none()
    assert " ERROR " not in server.log


def test_a_body_that_drips_is_given_up_and_holds_nothing_meanwhile(serve):
    server = serve(fake(slots=1) | {"body_timeout": 1})
    leftovers = Leftovers(server)
    with server.raw(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4096\r\n\r\n{"prom') as sock:
        assert server.complete("hi", max_tokens=1).status == 200
        answer = b""
        while piece := sock.recv(4096):
            answer += piece
    assert b" 408 " in answer.splitlines()[0]
    leftovers.assert_none()
