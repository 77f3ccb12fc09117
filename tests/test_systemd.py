"""What slimproc tells systemd and takes from it, with a socket in systemd's place."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slimproc.errors import ConfigError
from slimproc.systemd import ServiceManager, take_sockets
from tests.fakes import looped
from tests.serving import ServerProcess, fake, script, wait_until

ROOT = Path(__file__).parents[1]


class Manager:
    """Systemd's end of NOTIFY_SOCKET. ``lines``: all that was said, in its order."""

    def __init__(self, address: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(address)
        self.address = address.replace("\0", "@")
        self.lines: list[str] = []
        self._listening = threading.Thread(target=self._listen)  # the queue is short
        self._listening.start()

    def _listen(self) -> None:
        while message := self.sock.recv(4096):
            self.lines += message.decode().split("\n")

    def has_heard(self, line: str, times: int = 1) -> bool:
        return self.lines.count(line) >= times

    def close(self) -> list[str]:
        """All that was ever said."""
        if not self._listening.is_alive():
            return self.lines
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", self.sock.getsockname())
        self._listening.join()
        self.sock.close()
        return self.lines


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    found = Manager(str(tmp_path / "notify"))
    yield found
    found.close()


# --- telling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("abstract", [False, True])
def test_what_is_told_arrives_as_the_protocol_wants_it(tmp_path, abstract):
    address = f"@slimproc-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    heard = Manager("\0" + address[1:] if abstract else address)
    service = ServiceManager({"NOTIFY_SOCKET": address})
    service.ready("serving")
    service.status("two\nlines")
    service.reloading()
    service.stopping("draining")
    lines = heard.close()
    assert lines[:4] == ["READY=1", "STATUS=serving", "STATUS=two lines", "RELOADING=1"]
    assert lines[4].removeprefix("MONOTONIC_USEC=").isdigit()
    assert lines[5:] == ["STOPPING=1", "STATUS=draining"]


@pytest.mark.parametrize(
    "environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1"}, {"NOTIFY_SOCKET": "/nowhere/at/all"}]
)
def test_without_a_manager_that_can_be_reached_telling_does_nothing(environ):
    ServiceManager(environ).ready("serving")


def test_a_manager_that_does_not_read_is_not_waited_for_long(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(str(tmp_path / "notify"))
        service = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "notify")})
        for _ in range(10_000):
            service.status("x" * 1000)
        service.ready("serving")


@looped
async def test_the_watchdog_is_told_four_times_in_its_time(manager):
    usec = 400_000
    service = ServiceManager({"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": str(usec)})
    loop = asyncio.get_running_loop()
    slept: list[float] = []
    began = loop.time()
    task = asyncio.create_task(service.ping())
    while not manager.has_heard("WATCHDOG=1", 3):
        await asyncio.sleep(0.01)
        slept.append(loop.time() - began)
    task.cancel()
    assert slept[-1] >= 2 * usec / 4e6 * 0.9, "and not all at once"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "-5"},
        {"WATCHDOG_USEC": "soon"},
        {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"},
    ],
)
@looped
async def test_where_no_watchdog_of_this_process_is_set_none_is_told(manager, environ):
    await ServiceManager({"NOTIFY_SOCKET": manager.address, **environ}).ping()
    assert manager.close() == []


# --- sockets ----------------------------------------------------------------------------------------------------------

Passing = Callable[..., "subprocess.CompletedProcess[str]"]
_TAKE = """
import os, sys, socket
os.environ["LISTEN_PID"] = str(os.getpid())
from slimproc.systemd import take_sockets
from slimproc.errors import ConfigError
try:
    passed = take_sockets(os.environ)
except ConfigError as error:
    print(error)
else:
    print({name: (sock.getsockname()[1], sock.get_inheritable()) for name, sock in passed.items()})
print([name for name in os.environ if name.startswith("LISTEN_")])
"""


def passing(*sockets: socket.socket, names: str | None = None) -> list[str]:
    """What a process that was passed ``sockets`` makes of them, and its variables afterwards."""

    def place() -> None:
        moved = [os.dup(sock.fileno()) for sock in sockets]
        high = [os.dup2(fd, 50 + number) for number, fd in enumerate(moved)]
        for number, fd in enumerate(high):
            os.dup2(fd, 3 + number, inheritable=True)

    environ = (
        dict(os.environ) | {"LISTEN_FDS": str(len(sockets))} | ({} if names is None else {"LISTEN_FDNAMES": names})
    )
    done = subprocess.run(
        [sys.executable, "-c", _TAKE], env=environ, preexec_fn=place, close_fds=False, cwd=ROOT, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def test_a_passed_socket_is_taken_by_its_name_and_the_variables_with_it(listening):
    port = listening.getsockname()[1]
    assert passing(listening, names="http") == [f"{{'http': ({port}, False)}}", "[]"]
    assert passing(listening) == [f"{{'unknown': ({port}, False)}}", "[]"]


def test_two_sockets_with_one_name_are_refused(listening):
    assert "two sockets that are called 'a'" in passing(listening, listening, names="a:a")[0]


def test_what_does_not_listen_is_refused():
    with socket.socket() as idle, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        for sock in (idle, datagrams):
            assert "no stream socket that listens" in passing(sock, names="http")[0]


def test_what_is_no_socket_is_refused():
    with Path(os.devnull).open() as file:
        assert "that is no socket" in passing(file, names="http")[0]


@pytest.mark.parametrize("pid", ["", "1", "x"])
def test_sockets_that_were_passed_to_another_process_are_left_alone(pid):
    environ = {"LISTEN_PID": pid, "LISTEN_FDS": "1", "LISTEN_FDNAMES": "http", "OTHER": "kept"}
    assert take_sockets(environ) == {}
    assert environ == {"OTHER": "kept"}


def test_a_count_that_is_no_number_passes_nothing():
    assert take_sockets({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "many"}) == {}


def test_a_descriptor_that_is_not_there_is_a_wrong_configuration():
    with pytest.raises(ConfigError, match="no socket"):
        take_sockets({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1000000", "LISTEN_FDNAMES": "a:b"})


# --- a server that is told to ---------------------------------------------------------------------------------------------


def test_ready_is_said_when_it_serves_and_the_watchdog_hears_of_it_while_a_model_loads(tmp_path, manager):
    environ = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "400000"}
    with ServerProcess(tmp_path / "server", fake(load_time=2), **environ) as server:
        wait_until(lambda: manager.has_heard("READY=1"), "it is ready")
        assert f"STATUS=serving at {server.url}, 0 of 1 replicas ready" in manager.lines
        assert server.get("/healthz").status == 200
        assert server.get("/readyz").status == 503, "the model loads still"
        pings = manager.lines.count("WATCHDOG=1")
        server.wait_ready()
        wait_until(lambda: manager.has_heard(f"STATUS=serving at {server.url}, 1 of 1 replicas ready"), "it says so")
        assert manager.lines.count("WATCHDOG=1") >= pings + 4
        assert not manager.has_heard("STOPPING=1")
        with server.stream(script(token_latency=0.01), max_tokens=10_000) as reader:
            reader.take(1)
            server.process.terminate()
            wait_until(lambda: manager.has_heard("STOPPING=1"), "it says that it stops")
            pings = manager.lines.count("WATCHDOG=1")
            wait_until(lambda: manager.has_heard("WATCHDOG=1", pings + 2), "it pings while it drains")
        assert server.process.wait(30) == 0
    said = [line for line in manager.close() if line != "WATCHDOG=1" and not line.startswith("STATUS=")]
    assert said == ["READY=1", "STOPPING=1"]


def test_a_server_that_cannot_start_never_says_that_it_is_ready(tmp_path, manager, listening):
    environ = dict(os.environ) | {"NOTIFY_SOCKET": manager.address}
    port = listening.getsockname()[1]
    command = [sys.executable, "-m", "slimproc", "serve", "--backend", "fake", "--port", str(port)]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, check=False, timeout=60)
    assert done.returncode == 1
    assert manager.close() == []


def test_a_stop_while_a_model_loads_is_told_and_takes_no_longer_than_it_may(tmp_path, manager):
    environ = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "400000"}
    with ServerProcess(tmp_path / "server", fake(load_time=60), **environ) as server:
        wait_until(lambda: manager.has_heard("READY=1"), "it is ready")
        assert server.stop() == 0
    assert "STOPPING=1" in manager.close()
