"""What a server does when nobody asks anything of it: nothing; and what it never does: call out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.serving import fake, script, wait_until

linux = pytest.mark.skipif(sys.platform != "linux", reason="counts system calls and sockets through /proc and strace")
traced = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


def inet_sockets(pid: int) -> list:
    return psutil.Process(pid).net_connections("inet")


def serve_everything(server) -> None:
    """A request of each kind."""
    assert server.complete("hi", max_tokens=3).status == 200
    assert server.chat("hi", max_tokens=3).status == 200
    with server.stream("hi", max_tokens=3) as reader:
        list(reader.events())
    for path in ("/v1/models", "/readyz", "/metrics"):
        assert server.get(path).status == 200
    server.complete(script(error_at=1))
    server.complete(script(die_at=1))
    assert server.complete("hi", max_tokens=3).status == 200


@linux
@traced
def test_no_process_of_the_server_connects_to_the_outside(serve, tmp_path):
    trace = tmp_path / "trace"
    server = serve(
        fake(), wrapper=("strace", "-D", "-f", "-qq", "-e", "trace=connect,sendto,sendmsg", "-o", str(trace))
    )
    serve_everything(server)
    assert server.stop() == 0
    calls = trace.read_text().splitlines()
    assert calls, "strace has seen something"
    assert [line for line in calls if re.search(r"AF_INET6?\b", line) and "connect(" in line] == []
    assert [line for line in calls if re.search(r"sa_family=AF_INET", line)] == []


@linux
def test_the_server_and_its_children_hold_no_socket_but_the_listener_and_its_clients(serve):
    server = serve(fake())
    serve_everything(server)
    for sock in inet_sockets(server.process.pid):
        assert sock.laddr.port == server.port
    for child in server.children():
        assert inet_sockets(child.pid) == []


def system_calls(pid: int, seconds: float) -> list[str]:
    """The system calls of all threads of a process in so many seconds, as strace writes them."""
    with subprocess.Popen(
        ["timeout", "-s", "INT", str(seconds), "strace", "-f", "-qq", "-o", "/dev/stdout", "-p", str(pid)],
        stdout=subprocess.PIPE, text=True,
    ) as tracer:  # fmt: skip
        lines = tracer.stdout.read().splitlines()
    return [line for line in lines if not re.search(r"resumed|restart_syscall|\+\+\+", line)]


@linux
@traced
@pytest.mark.slow
def test_an_idle_engine_makes_no_system_call_and_the_front_only_those_of_its_timers_and_memory_samples(serve):
    server = serve(fake())
    serve_everything(server)
    server.wait_idle()
    engine = server.replica()["pid"]
    assert len(system_calls(engine, 2)) <= 4, "each thread may be seen to wait"
    calls = system_calls(server.process.pid, 2)
    # Four samples of memory and three timers a second: a wake-up is a wait that ends and a look for more.
    assert sum("epoll" in call for call in calls) <= 2 * 2 * (4 + 3) * 2, calls
    assert len(calls) <= 200, calls
    assert {re.sub(r"^\d+ +", "", call).split("(")[0] for call in calls} <= {
        "epoll_pwait",
        "epoll_wait",
        "futex",
        "getpid",
        "read",
    }


@linux
def test_engines_inherit_nothing_but_what_they_need(serve):
    secret = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(secret, True)
    server = serve(fake(replicas=2))
    os.close(secret)
    for index in (0, 1):
        links = [str(link.readlink()) for link in Path(f"/proc/{server.replica(index)['pid']}/fd").iterdir()]
        assert not any("admin.sock" in link for link in links)
        assert len(links) <= 10, links
        assert inet_sockets(server.replica(index)["pid"]) == []


def test_a_server_that_was_idle_for_a_while_answers_like_a_fresh_one(server):
    assert server.complete("hi", max_tokens=1).status == 200
    wait_until(lambda: server.replica()["since"] > 1, "a second has passed")
    assert server.complete("hi", max_tokens=1).status == 200
