"""An engine that hears nothing has commands waiting for it: nobody waits for it without end, least of all the front."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from tests.faults.leftovers import Leftovers, all_gone, ended_once
from tests.serving import fake, script, wait_until

pytestmark = pytest.mark.slow

LONG = "word " * 60_000
"""Of which the command socket holds hardly one."""


def stuck(serve, **top):
    """A server, and six requests that are on their way to an engine that is stopped."""
    config = fake(slots=8, context=1_000_000) | {"stall_timeout": 60, "cancel_grace": 60, "log_json": True} | top
    server = serve(config)
    leftovers = Leftovers(server)
    server.kill_engine(number=signal.SIGSTOP)
    told = LONG + "\n" + script(tokens=["x"])
    pending = [server.begin(told, stream=place % 2 == 0) for place in range(6)]
    server.wait_sequences(6)
    return server, leftovers, pending


def test_commands_that_a_stopped_engine_never_read_are_the_next_ones_when_it_is_killed(serve):
    server, leftovers, pending = stuck(serve)
    front = psutil.Process(server.process.pid)
    before = sum(front.cpu_times()[:2])
    pending[0].sock.settimeout(1.0)
    with pytest.raises(TimeoutError):
        pending[0].sock.recv(1)
    assert sum(front.cpu_times()[:2]) - before < 0.5, "to wait for room takes no processor"
    assert server.get("/healthz").status == 200
    pending[0].sock.settimeout(30)
    server.kill_engine()
    answers = [one.answer() for one in pending]
    assert [one.status for one in answers] == [200] * 6
    assert all(b'"x"' in one.body for one in answers)
    ended_once(server, 6)
    leftovers.assert_none()


def test_a_shutdown_while_commands_wait_for_a_stopped_engine_tells_everybody_and_ends(serve):
    server, _, pending = stuck(serve, shutdown_timeout=1)
    children = server.children()
    server.process.send_signal(signal.SIGTERM)
    assert [one.answer().status for one in pending] == [503] * 6
    assert server.process.wait(30) == 0
    all_gone(children)
    ended_once(server, 6)
    assert "Traceback" not in server.log


def test_an_engine_killed_by_a_shutdown_while_its_socket_is_full_keeps_nobody(serve):
    server, _, pending = stuck(serve, shutdown_timeout=5)
    children = server.children()
    pid = server.replica()["pid"]
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.records("stopping"), "it stops")
    os.kill(pid, signal.SIGKILL)
    assert {one.answer().status for one in pending} <= {500, 503}
    assert server.process.wait(30) == 0
    all_gone(children)
    ended_once(server, 6)
