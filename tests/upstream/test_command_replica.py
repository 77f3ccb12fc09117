"""A replica that is a server which we start from a command line: how it comes up, and that nothing of it stays."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from slimproc.config.upstream import Command
from slimproc.replicas import owner
from slimproc.replicas.states import ReplicaEvent, ReplicaState
from slimproc.upstream import guard
from slimproc.upstream.child import Child
from tests.fakes import eventually, looped
from tests.processes import lives
from tests.upstream.harness_upstream import UpstreamKeeper

S = ReplicaState
SCRIPT = str(Path(__file__).with_name("small_server.py"))
linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody tells whose parent a process was")


def command(*manners: str, env: dict[str, str] | None = None) -> Command:
    return Command(argv=(sys.executable, SCRIPT, "${PORT}", *manners), env=env or {}, ready_path="/ready")


def family(pid: int | None) -> list[psutil.Process]:
    """A process and all its descendants."""
    leader = psutil.Process(pid)
    return [leader, *leader.children(recursive=True)]


async def gone(processes: list[psutil.Process]) -> None:
    await eventually(lambda: not any(map(lives, processes)), f"nothing is left of {processes}")


async def ask(url: str) -> dict[str, Any]:
    def read() -> dict[str, Any]:
        with urllib.request.urlopen(url + "/what", timeout=20) as answer:  # our own server
            return json.loads(answer.read())

    return await asyncio.to_thread(read)


# --- coming up --------------------------------------------------------------------------------------------------------


@looped
async def test_a_server_comes_up_serves_and_is_stopped_by_a_signal():
    async with UpstreamKeeper(command()) as keeper:
        life = await keeper.start()
        assert keeper.states == [S.STOPPED, S.STARTING, S.READY]
        assert life.pid == keeper.replica.pid
        assert keeper.replica.remains == ""
        slot = keeper.take()
        answer = await ask(slot.base_url)
        assert answer["argv"] == [slot.base_url.rpartition(":")[2]]
        slot.release()
        processes = family(life.pid)
        assert os.getpgid(answer["pid"]) == life.pid, "one group, so that its memory can be told"
        await keeper.stop()
        assert keeper.states[-3:] == [S.DRAINING, S.STOPPING, S.STOPPED]
        await gone(processes)


@looped
async def test_the_port_is_put_into_arguments_and_environment():
    env = {"WHERE": "127.0.0.1:${PORT}", "PLAIN": "$PORT"}
    async with UpstreamKeeper(command("--base=http://x:${PORT}/", env=env)) as keeper:
        await keeper.start()
        slot = keeper.take()
        port = slot.base_url.rpartition(":")[2]
        answer = await ask(slot.base_url)
        assert answer["argv"] == [port, f"--base=http://x:{port}/"]
        assert answer["environ"]["WHERE"] == f"127.0.0.1:{port}"
        assert answer["environ"]["PLAIN"] == "$PORT"
        slot.release()


@pytest.mark.parametrize(
    ("device", "seen"), [("host", ""), ("GPU-1", "GPU-1"), (None, "0,1")], ids=["host", "a GPU", "anywhere"]
)
@looped
async def test_it_sees_the_device_that_it_was_given_and_none_of_the_service_managers_channels(device, seen):
    environ = dict(os.environ) | {"CUDA_VISIBLE_DEVICES": "0,1", "NOTIFY_SOCKET": "/run/x", "MARK": "ours"}
    async with UpstreamKeeper(command(), environ=environ) as keeper:
        keeper.replica.ask_start(device=device)
        await keeper.until_ready()
        assert keeper.replica.device == device
        slot = keeper.take()
        answer = (await ask(slot.base_url))["environ"]
        assert answer["CUDA_VISIBLE_DEVICES"] == seen
        assert answer["MARK"] == "ours"
        assert "NOTIFY_SOCKET" not in answer
        slot.release()


@linux
@looped
async def test_it_inherits_no_descriptor_not_even_an_inheritable_one():
    held = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(held, True)  # its only parameter
    try:
        async with UpstreamKeeper(command()) as keeper:
            await keeper.start()
            slot = keeper.take()
            found = (await ask(slot.base_url))["descriptors"]
            assert {0, 1, 2} <= set(found)
            assert len(found) <= 6, f"{found}: its own two sockets and the listing are allowed"
            slot.release()
    finally:
        os.close(held)


@looped
async def test_it_is_ready_when_its_ready_path_answers_2xx():
    async with UpstreamKeeper(command("slow")) as keeper:
        life = await keeper.start()
        assert life.load_seconds >= 0.3


@looped
async def test_a_server_that_never_answers_is_killed_at_the_load_limit():
    async with UpstreamKeeper(command("deaf", "children"), load_timeout=1.0) as keeper:
        keeper.replica.ask_start()
        await eventually(lambda: keeper.replica.pid and len(family(keeper.replica.pid)) >= 4, "it has children")
        processes = family(keeper.replica.pid)
        await eventually(lambda: S.KILLING in keeper.states, "it is killed")
        assert "did not load within 1 s" in keeper.replica.reason
        await gone(processes)


@looped
async def test_a_server_that_dies_in_its_load_is_known_at_once_with_its_last_line():
    async with UpstreamKeeper(command("exit", "3")) as keeper:
        keeper.replica.ask_start()
        await eventually(lambda: S.BACKOFF in keeper.states, "its death is known")
        assert keeper.replica.reason == "the server exited with 3: the model is not there"
        assert keeper.replica.load_failed


@pytest.mark.parametrize("name", ["/no/such/program", "no-such-program-here", str(Path(__file__).parent)])
@looped
async def test_a_command_that_is_not_there_fails_for_good_and_by_name(name):
    async with UpstreamKeeper(Command(argv=(name, "${PORT}"))) as keeper:
        keeper.replica.ask_start()
        await keeper.until(S.FAILED)
        assert name in keeper.replica.reason
        assert keeper.states == [S.STOPPED, S.STARTING, S.BACKOFF, S.FAILED]


# --- its end ----------------------------------------------------------------------------------------------------------


@looped
async def test_a_death_is_noticed_while_idle_and_another_is_started():
    async with UpstreamKeeper(command()) as keeper:
        first = await keeper.start()
        slot = keeper.take()
        os.kill((await ask(slot.base_url))["pid"], signal.SIGSEGV)
        second = await keeper.until_ready(after=first)
        assert "ended by SIGSEGV" in slot.lost
        assert second.pid != first.pid
        assert keeper.metrics.engine_restarts["exited"] == 1
        slot.release()


@linux
@pytest.mark.parametrize("manner", ["stopped", "stubborn", "died", "guard killed"])
@looped
async def test_nothing_that_it_started_outlives_it(manner):
    """Also what has left its process group; but then only if the guard that watches over it is left alive."""
    stubborn = ["stubborn"] if manner == "stubborn" else []
    async with UpstreamKeeper(command("children", *stubborn), unload_timeout=1.0) as keeper:
        life = await keeper.start()
        slot = keeper.take()
        pid = (await ask(slot.base_url))["pid"]
        slot.release()
        processes = family(life.pid)
        assert len(processes) == 4
        if manner == "died":
            os.kill(pid, signal.SIGKILL)
        elif manner == "guard killed":
            os.kill(life.pid, signal.SIGKILL)
            escaped = [found for found in processes[1:] if os.getsid(found.pid) != life.pid]
            processes = [found for found in processes if found not in escaped]
        else:
            keeper.replica.ask_stop(0.0)
        await gone(processes)
        if manner == "guard killed":
            assert len(escaped) == 1
            escaped[0].kill()


@linux
@looped
async def test_a_guard_that_is_killed_takes_the_server_with_it_though_nobody_looks_after_its_group():
    line, ours = os.pipe()
    arguments = [sys.executable, guard.__file__, "end", "", sys.executable, "-c", "import time; time.sleep(3600)"]
    actions = [(os.POSIX_SPAWN_DUP2, line, guard.LIFELINE)]
    pid = os.posix_spawn(sys.executable, arguments, dict(os.environ), file_actions=actions, setsid=True)  # noqa: ASYNC221  # 0.3 ms
    os.close(line)
    processes = await eventually(lambda: family(pid)[1:], "its server runs")
    await eventually(lambda: "-c" in processes[0].cmdline(), "it is the server by now")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)  # noqa: ASYNC222  # it has been killed
    await gone(processes)
    os.close(ours)


@linux
@looped
async def test_nothing_outlives_a_front_that_is_killed(tmp_path):
    """A process that starts one such server and is killed with no time to clean up."""
    front = f"""
import asyncio, os, sys
sys.path[:0] = {sys.path!r}
from tests.upstream.harness_upstream import UpstreamKeeper
from tests.upstream.test_command_replica import command, family

async def main():
    async with UpstreamKeeper(command("children")) as keeper:
        life = await keeper.start()
        print(*(found.pid for found in family(life.pid)), flush=True)
        os.kill(os.getpid(), 9)

asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", front, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 30)
    pids = [int(word) for word in line.split()]
    assert len(pids) == 4, await process.communicate()
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):  # gone already
            processes.append(psutil.Process(pid))
    await gone(processes)
    await process.communicate()


@looped
async def test_a_stop_while_it_comes_up_ends_it():
    async with UpstreamKeeper(command("deaf")) as keeper:
        keeper.replica.ask_start()
        await eventually(lambda: keeper.replica.pid, "it is started")
        processes = family(keeper.replica.pid)
        await keeper.stop()
        assert keeper.states == [S.STOPPED, S.STARTING, S.STOPPING, S.STOPPED]
        await gone(processes)


@looped
async def test_a_server_that_answers_nothing_any_more_is_killed_and_started_again():
    async with UpstreamKeeper(command(), status_timeout=0.2) as keeper:
        first = await keeper.start()
        slot = keeper.take()
        pid = (await ask(slot.base_url))["pid"]
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(0)
        assert keeper.replica.serving is first
        slot.release()
        await keeper.until_ready(after=first)
        assert keeper.states[-4:] == [S.KILLING, S.BACKOFF, S.STARTING, S.READY]
        assert keeper.metrics.engine_restarts["stalled"] == 1


@looped
async def test_who_is_in_a_server_that_cannot_be_killed_is_told_before_it_ends(monkeypatch):
    kill = Child.kill
    monkeypatch.setattr(owner, "KILL_LIMIT", 0.05)
    monkeypatch.setattr(Child, "kill", lambda _: None)
    async with UpstreamKeeper(command()) as keeper:
        life = await keeper.start()
        slot = keeper.take()
        keeper.replica._post(ReplicaEvent.STALLED, life, "the server is not well")
        await eventually(lambda: keeper.replica.stuck, "it is given up")
        assert (keeper.replica.state, slot.lost) == (S.KILLING, "the server is not well")
        assert f"process {life.pid} does not end" in keeper.replica.unload_failed
        slot.release()
        monkeypatch.setattr(Child, "kill", kill)
        life.kill()
        await keeper.until_ready(after=life)
        assert keeper.replica.stuck == ""


@looped
async def test_a_server_that_is_busy_may_be_silent():
    """Its process is stopped for a while, with a request in it."""
    async with UpstreamKeeper(command(), status_timeout=0.02) as keeper:
        first = await keeper.start()
        slot = keeper.take()
        pid = (await ask(slot.base_url))["pid"]
        looks = []
        real = keeper.replica._source.look

        async def look(base_url: str) -> None:
            looks.append(base_url)
            await real(base_url)

        keeper.replica._source.look = look
        os.kill(pid, signal.SIGSTOP)
        await eventually(lambda: len(looks) > 6, "it is looked at in vain")
        assert keeper.replica.serving is first
        os.kill(pid, signal.SIGCONT)
        before = len(looks)
        await eventually(lambda: len(looks) > before + 2, "it answers again")
        slot.release()


@looped
async def test_starts_and_deaths_leave_nothing_open():
    async with UpstreamKeeper(command()) as keeper:
        me = psutil.Process()
        await keeper.start()
        await keeper.stop()
        before = (me.num_fds(), len(me.children(recursive=True)))
        for _ in range(3):
            life = await keeper.start()
            os.kill(life.pid, signal.SIGKILL)
            await keeper.until_ready(after=life)
            await keeper.stop()
        assert (me.num_fds(), len(me.children(recursive=True))) == before


@looped
async def test_its_lines_go_to_our_log_under_its_name(caplog):
    caplog.set_level("INFO")
    async with UpstreamKeeper(command()) as keeper:
        await keeper.start()
        wanted = {"a line to stdout", "a line to stderr"}

        def seen() -> bool:
            lines = [record for record in caplog.records if record.name == "slimproc.upstream.output"]
            named = {record.getMessage() for record in lines if record.fields == {"replica": "m/0"}}
            return wanted <= named

        await eventually(seen, "both lines are there")
