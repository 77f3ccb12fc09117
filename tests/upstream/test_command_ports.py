"""Whose a port is that a server was given: it is ready only when it may be itself who answers there."""

from __future__ import annotations

import contextlib
import http.server
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from slimproc.replicas.states import ReplicaState
from slimproc.upstream import ports
from slimproc.upstream.ports import Owner, Ports
from tests.fakes import eventually, looped, turns
from tests.serving import wait_until
from tests.upstream.harness_upstream import HASTE, UpstreamKeeper, closed_port
from tests.upstream.test_command_replica import SCRIPT, command

S = ReplicaState
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody tells whose a port is")


class Answering(http.server.BaseHTTPRequestHandler):
    """200 to everything."""

    def do_GET(self) -> None:  # the base class calls it so
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def ourselves() -> Iterator[int]:
    """A port on which this process listens."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@contextlib.contextmanager
def another_of_ours() -> Iterator[int]:
    """A port on which a child of this process listens."""
    port = closed_port()
    with subprocess.Popen([sys.executable, SCRIPT, str(port)], stdout=subprocess.DEVNULL) as child:
        try:
            wait_until(lambda: ports._listening(port), "it listens")
            yield port
        finally:
            child.kill()


@contextlib.contextmanager
def nobody_of_ours(port: int) -> Iterator[int]:
    """Somebody listens on the port whose parent is not this process."""
    shell = f"{sys.executable} {SCRIPT} {port} > /dev/null 2>&1 & echo $!"
    pid = int(subprocess.run(["/bin/sh", "-c", shell], capture_output=True, check=True, text=True).stdout)
    try:
        wait_until(lambda: ports._listening(port), "it listens")
        yield port
    finally:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("stranger", [ourselves, another_of_ours])
@looped
async def test_a_server_whose_port_another_of_ours_answers_is_ended_and_gets_another_port(stranger, monkeypatch):
    """However long it lives itself: it may still be on its way to find its port taken."""
    real = ports.free_port
    with stranger() as taken:
        given = [taken]
        monkeypatch.setattr(ports, "free_port", lambda: given.pop() if given else real())
        async with UpstreamKeeper(command("late")) as keeper:
            keeper.replica.ask_start()
            await eventually(lambda: S.BACKOFF in keeper.states, "it fails")
            assert S.READY not in keeper.states
            assert keeper.replica.reason == f"its port {taken} is taken by another process"
            life = await keeper.until_ready()
            assert not life.base_url.endswith(f":{taken}")


@looped
async def test_a_server_that_takes_long_to_find_its_port_taken_is_not_ready_before(monkeypatch):
    """By somebody whom we do not know, and who was there before."""
    pace = replace(HASTE, settle=0.05)
    with nobody_of_ours(closed_port()) as taken:
        monkeypatch.setattr(ports, "free_port", lambda: taken)
        async with UpstreamKeeper(command("late"), pace=pace) as keeper:
            keeper.replica.ask_start()
            await eventually(lambda: S.BACKOFF in keeper.states, "it fails")
            assert S.READY not in keeper.states
            assert "in use" in keeper.replica.reason


@pytest.mark.parametrize("older", [False, True], ids=["younger", "older"])
@looped
async def test_a_server_in_a_container_need_not_own_its_port(older, monkeypatch, caplog):
    """What listens is not among its processes, and it lives on: that is said, and taken for its own after a while."""
    port = closed_port()
    monkeypatch.setattr(ports, "free_port", lambda: port)
    async with UpstreamKeeper(command("deaf"), pace=replace(HASTE, doubtful=0.6)) as keeper:
        with contextlib.ExitStack() as container:
            if older:
                container.enter_context(nobody_of_ours(port))
            keeper.replica.ask_start()
            await eventually(lambda: keeper.replica.pid, "it is started")
            if not older:
                container.enter_context(nobody_of_ours(port))
            life = await keeper.until_ready()
            assert life.load_seconds >= (0.6 if older else 0.4)
    assert any("no process of its own" in record.getMessage() for record in caplog.records)


@looped
async def test_a_server_that_serves_in_a_session_of_its_own_is_known_at_once(caplog):
    async with UpstreamKeeper(command("apart"), pace=replace(HASTE, settle=3600.0)) as keeper:
        await keeper.start()
    assert not any("no process of its own" in record.getMessage() for record in caplog.records)


def test_two_servers_are_never_given_the_same_port(monkeypatch):
    offered = iter([5, 5, 6, 5])
    monkeypatch.setattr(ports, "free_port", lambda: next(offered))
    given = Ports()
    assert (given.take(), given.take()) == (5, 6)
    given.give_back(5)
    assert given.take() == 5


@looped
async def test_a_port_is_given_back_when_its_server_has_ended(monkeypatch):
    given = []
    real = Ports.give_back
    monkeypatch.setattr(Ports, "give_back", lambda self, port: given.append(port) or real(self, port))
    async with UpstreamKeeper(command()) as keeper:
        life = await keeper.start()
        await turns()
        assert given == []
        await keeper.stop()
        assert given == [int(life.base_url.rpartition(":")[2])]


def test_a_port_on_which_nobody_listens_is_nobodys():
    assert ports.owner(os.getpid(), closed_port()) is Owner.UNSEEN
    assert ports.owner(2**22 - 1, closed_port()) is Owner.UNSEEN
