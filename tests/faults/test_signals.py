"""Signals to the front: what an orderly end is."""

from __future__ import annotations

import signal

import pytest

from tests.faults.leftovers import all_gone, ended_once
from tests.serving import COMPLETIONS, fake, script, wait_until

ENDLESS = script(token_latency=0.01)


def test_sigterm_under_load_lets_finish_what_can_tells_all_others_and_leaves_nothing(serve):
    """One stream that ends in time, one that does not, a joined answer that does not, two that wait, and a newcomer on
    a connection that was open.
    """
    server = serve(fake(slots=3, context=1_000_000) | {"shutdown_timeout": 2, "log_json": True})
    children = server.children()
    newcomer = server.connect()
    newcomer.request("GET", "/healthz")
    newcomer.getresponse().read()
    short = server.stream(script(tokens=["x"], repeat=60, token_latency=0.02), max_tokens=100)
    short.take(1)
    long = server.stream(ENDLESS, max_tokens=900_000)
    long.take(1)
    joined = server.begin(ENDLESS, max_tokens=900_000)
    server.wait_sequences(3)
    queued = [server.begin("hi", stream=stream) for stream in (True, False)]
    server.wait_queued(2)

    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.records("stopping"), "it has heard")
    (waits,) = wait_until(
        lambda: server.records("waiting for running requests; a second signal ends them"), "it says so"
    )
    assert waits["at_most_s"] == 2
    with pytest.raises(ConnectionRefusedError):
        server.raw(b"")
    newcomer.request("POST", COMPLETIONS, b'{"prompt":"hi"}')
    refused = newcomer.getresponse()
    assert (refused.status, b'"shutting_down"' in refused.read()) == (503, True)
    assert [one.answer().status for one in queued] == [503, 503]
    *chunks, done = short.events()
    assert (chunks[-1]["choices"][0]["finish_reason"], done) == ("stop", "[DONE]")
    *_, error, done = long.events()
    assert (error["error"]["code"], done) == ("shutting_down", "[DONE]")
    assert joined.answer().status == 503

    assert server.process.wait(30) == 0
    all_gone(children)
    ended_once(server, 5)
    assert not server.admin_socket.exists()
    assert "Traceback" not in server.log


def test_sigterm_to_an_engine_is_a_death_that_is_mended_and_sigint_is_none(serve):
    """A terminal's Ctrl-C reaches the whole process group of the front, and is the front's alone to hear."""
    server = serve(fake())
    pid = server.kill_engine(number=signal.SIGINT)
    assert server.complete("hi", max_tokens=1).status == 200
    assert server.replica()["pid"] == pid
    server.kill_engine(number=signal.SIGTERM)
    wait_until(lambda: server.replica()["pid"] not in (pid, None), "it is replaced")
    assert server.wait_ready().complete("hi", max_tokens=1).status == 200
