"""The front itself dies or is blocked: no engine outlives it, and the next front serves."""

from __future__ import annotations

import os
import signal
import socket
import sys

import psutil
import pytest

from tests.faults.leftovers import all_gone
from tests.faults.planted import plant
from tests.serving import ServerProcess, fake, script, wait_until


def recv_all(manager: socket.socket) -> None:
    """Everything that is said, until nothing is for as long as ``manager`` waits."""
    for _ in range(100):
        manager.recv(4096)


def engines(server: ServerProcess) -> list[psutil.Process]:
    return [child for child in server.children() if "slimproc.engines" in child.cmdline()]


@pytest.mark.slow
@pytest.mark.parametrize("round_", range(5))
def test_a_front_killed_right_after_it_has_spawned_leaves_no_engine(tmp_path, round_):
    """Not even one that has not yet asked to die with its parent."""
    with ServerProcess(tmp_path, fake(replicas=2, load_time=5)) as server:
        victim = server.replica(0)
        os.kill(victim["pid"], signal.SIGKILL)
        wait_until(lambda: server.replica(0)["pid"] not in (None, victim["pid"]), "another one has been spawned")
        children = server.children()
        server.process.kill()
        server.process.wait(30)
        all_gone(children)


@pytest.mark.slow
@pytest.mark.parametrize("round_", range(5))
def test_a_front_killed_in_mid_stream_leaves_nothing_and_the_next_one_serves_at_the_same_address(tmp_path, round_):
    with ServerProcess(tmp_path / "first", fake(replicas=2, context=1_000_000)) as server:
        server.wait_ready()
        with server.stream(script(token_latency=0.01), max_tokens=900_000) as stream:
            stream.take(2)
            children = server.children()
            assert len(engines(server)) == 2
            server.process.kill()
            server.process.wait(30)
            all_gone(children)
        address = f"127.0.0.1:{server.port}"
        config = fake() | {"listen": address, "admin_socket": str(server.admin_socket)}
        with ServerProcess(tmp_path / "second", config) as second:
            assert second.wait_ready().complete("hi", max_tokens=1).status == 200


@pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux's")
def test_a_front_whose_loop_is_blocked_stops_telling_the_watchdog_and_an_abort_leaves_its_stack_and_no_engine(tmp_path):
    """What systemd does is done by hand here; tests/systemd_lab has systemd do it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        environ = {
            "NOTIFY_SOCKET": str(tmp_path / "notify"),
            "WATCHDOG_USEC": "2000000",
            "PYTHONFAULTHANDLER": "1",  # as the unit sets it
        }
        with ServerProcess(tmp_path / "server", fake(), **environ, **plant(tmp_path)) as server:
            server.wait_ready()
            children = server.children()
            while b"WATCHDOG=1" not in manager.recv(4096):
                pass
            server.process.send_signal(signal.SIGUSR2)  # the loop sleeps from now on
            manager.settimeout(2)
            with pytest.raises(TimeoutError):
                recv_all(manager)
            server.process.send_signal(signal.SIGABRT)
            assert server.process.wait(30) == -signal.SIGABRT
            assert "in _block" in server.log
            all_gone(children)
