"""An engine as a process: what it inherits, what it leaves in its last words, and that it never outlives its front."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slimproc.ipc import wire
from slimproc.ipc.credit import default_credit
from slimproc.replicas.environment import engine_environment
from slimproc.replicas.process import EngineProcess, ExitStatus
from slimproc.settings import EngineSettings
from tests.fakes import LIMIT, eventually, looped
from tests.replicas.harness import Keeper, exists, script

ROOT = Path(__file__).parents[2]
linux = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")

STUB = '''
import ctypes, os, sys
from slimproc.engines import backend, lifeline
from slimproc.engines.fake import FakeBackend

class Wedged(FakeBackend):
    """Its step is a native call that keeps the interpreter."""
    def load(self, progress):
        print("words on stdout")
        if not os.fork():
            os.write(1, b"words of a child\\n")
            os._exit(0)
        return super().load(progress)
    def step(self):
        ctypes.PyDLL(None).sleep(60)

backend.BACKENDS["wedged"] = "sitecustomize:Wedged"
'''


@pytest.fixture
def planted(tmp_path: Path) -> dict[str, str]:
    """An environment in which engines know one more backend, and where a test can plant more."""
    (tmp_path / "sitecustomize.py").write_text(STUB)
    return dict(os.environ) | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PLANT": str(tmp_path / "sitecustomize.py")}


# --- what it inherits -------------------------------------------------------------------------------------------------


def descriptors(pid: int) -> dict[int, str]:
    return {int(entry.name): str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()}


def environment(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)


def plant(planted: dict[str, str], more: str) -> None:
    Path(planted["PLANT"]).write_text(STUB + more)


@linux
@looped
async def test_an_engine_has_its_seven_descriptors_and_none_that_was_left_open():
    left_open = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
    high = os.dup2(left_open[0], 500)
    for fd in (*left_open, high):
        os.set_inheritable(fd, True)
    try:
        async with Keeper() as keeper:
            engine = await keeper.start()
            links = descriptors(engine.process.pid)
            assert [number for number, link in links.items() if link == "/dev/null"] == [0]
            assert links[1] == links[2]
            assert links[3].startswith("socket:")
            assert links[4].startswith(("/memfd:", "/dev/shm", "/tmp"))
            # The map keeps a duplicate of 4, and that is all.
            assert {links[number] for number in links if number > 6} <= {links[4]}
    finally:
        for fd in (*left_open, high):
            os.close(fd)


@linux
@looped
async def test_an_engine_leads_its_own_session_and_ignores_the_terminals_interrupt():
    async with Keeper() as keeper:
        engine = await keeper.start()
        assert os.getsid(engine.process.pid) == engine.process.pid
        os.kill(engine.process.pid, signal.SIGINT)
        stream = keeper.generate()
        await eventually(lambda: stream.ended, "it serves")
        assert stream.error is None


@linux
@looped
async def test_an_engine_does_not_know_the_service_managers_channels():
    secret = {
        "NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "LISTEN_FDS": "1", "LISTEN_PID": "1",
        "CREDENTIALS_DIRECTORY": "/run/c",
    }  # fmt: skip
    async with Keeper(environ=dict(os.environ) | secret | {"KEPT": "yes"}) as keeper:
        engine = await keeper.start()
        names = environment(engine.process.pid)
        assert not set(secret) & set(names)
        assert (names["KEPT"], names["GGML_NO_BACKTRACE"]) == ("yes", "1")


@looped
async def test_signals_that_the_front_ignores_are_not_ignored_by_engines():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        async with Keeper() as keeper:
            engine = await keeper.start()
            os.kill(engine.process.pid, signal.SIGTERM)
            await keeper.until_ready(after=engine)
            assert engine.status is not None
            assert engine.status.signal_name == "SIGTERM"
    finally:
        signal.signal(signal.SIGTERM, before)


@looped
async def test_an_engine_that_is_told_to_stop_before_it_has_begun_to_load_just_ends():
    exits: list[ExitStatus] = []
    process = EngineProcess(
        name="m/0",
        replica=0,
        ring_size=1 << 16,
        credit=default_credit(),
        environ=engine_environment(os.environ, "fake"),
    )
    process.watch_exit(exits.append)
    process.control.send(wire.encode(wire.Load(process.epoch, EngineSettings(model="m", backend="fake"))))
    process.control.send(wire.encode(wire.Shutdown()))
    await eventually(lambda: exits, "it ends")
    process.close()
    assert (exits[0].code, exits[0].last_line) == (0, "")


# --- last words -------------------------------------------------------------------------------------------------------


@looped
async def test_what_a_crash_was_is_in_the_failures_reason_and_the_stacks_after_it_are_kept():
    async with Keeper() as keeper:
        engine = await keeper.start()
        stream = keeper.generate(script(tokens=["a", "b"], die_at=2, signal=int(signal.SIGABRT)), None)
        await eventually(lambda: stream.ended, "it fails")
        lines = engine.process.last_lines
        assert "Fatal Python error: Aborted" in lines
        assert stream.error is not None
        assert "was ended by SIGABRT" in stream.error.message
        assert stream.error.message.endswith("Fatal Python error: Aborted")
        assert lines[-1] not in stream.error.message, "where it happened says nothing to a caller"


@looped
async def test_what_an_engine_or_its_libraries_print_is_kept_and_corrupts_nothing(planted):
    async with Keeper(backend="wedged", environ=planted) as keeper:
        engine = await keeper.start()
        await eventually(lambda: len(engine.process.last_lines) >= 2, "its words are heard")
        assert set(engine.process.last_lines) == {"words on stdout", "words of a child"}


@looped
async def test_only_so_many_lines_and_so_much_of_a_line_are_kept(planted):
    plant(
        planted,
        "for number in range(1000): print(number, file=sys.stderr)\nprint('x' * 5000, end='', file=sys.stderr)\n",
    )
    async with Keeper(environ=planted) as keeper:
        engine = await keeper.start()
        await keeper.stop()
        lines = engine.process.last_lines
        assert lines[-2] == "999"
        assert lines[-1] == "x" * 1000
        assert len(lines) <= 40


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (ExitStatus(0, ""), "the engine exited with 0"),
        (ExitStatus(3, "no such file"), "the engine exited with 3: no such file"),
        (ExitStatus(-9, ""), "the engine was ended by SIGKILL"),
        (ExitStatus(-63, ""), "the engine was ended by signal 63"),
    ],
)
def test_an_exit_status_reads_as_a_sentence(status, text):
    assert str(status) == text


@looped
async def test_a_native_call_that_keeps_the_interpreter_is_ended_by_the_engines_own_watchdog(planted):
    """Neither a signal handler nor a thread of Python gets a turn there; the stack of who called is left behind."""
    exits: list[ExitStatus] = []
    environ = engine_environment(planted, "fake")
    process = EngineProcess(name="m/0", replica=0, ring_size=1 << 16, credit=default_credit(), environ=environ)
    process.watch_exit(exits.append)
    try:
        settings = EngineSettings(model="m", backend="wedged")
        process.control.send(wire.encode(wire.Load(process.epoch, settings, step_limit=0.5)))
        said: list[bytes] = []
        await eventually(
            lambda: said.extend(process.control.receive()) or any(b"ready" in word for word in said), "READY"
        )
        process.control.send(wire.encode(wire.Submit(rid=1, prompt="go")))
        await eventually(lambda: exits, "it is ended")
        assert exits[0].code == 1
        stack = "\n".join(process.last_lines)
        assert "Timeout" in stack
        assert "sitecustomize.py" in stack
        assert "in step" in stack
    finally:
        if not exits:
            process.signal(signal.SIGKILL)
            await eventually(lambda: exits, "it is killed")
        process.close()


# --- idle -------------------------------------------------------------------------------------------------------------


@linux
@looped
async def test_an_idle_engine_makes_no_system_call_for_two_seconds():
    async with Keeper() as keeper:
        engine = await keeper.start()
        stream = keeper.generate()
        await eventually(lambda: stream.ended, "it has served")
        await eventually(lambda: _sleeping(engine.process.pid), "it sleeps")
        assert await _activity(engine.process.pid) == []


def _sleeping(pid: int) -> bool:
    states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").iterdir()]
    return all(state == "S" for state in states)


async def _activity(pid: int) -> list[str]:
    """What the process did in two seconds: its system calls where strace may look, else its context switches."""
    if shutil.which("strace"):
        tracer = await asyncio.create_subprocess_exec(
            "timeout", "-s", "INT", "2", "strace", "-f", "-qq", "-p", str(pid), stderr=asyncio.subprocess.PIPE
        )
        _, said = await tracer.communicate()
        lines = said.decode().splitlines()
        if not any("ptrace" in line or ("attach" in line.lower() and "failed" in line) for line in lines):
            # What it was in when the tracer came and left is no new call.
            return [
                line for line in lines if "unfinished" not in line and "detached" not in line and "resum" not in line
            ]
    before = _switches(pid)
    await asyncio.sleep(2)
    return [] if _switches(pid) == before else ["it was awake"]


def _switches(pid: int) -> list[str]:
    return [
        line
        for task in sorted(Path(f"/proc/{pid}/task").iterdir())
        for line in (task / "status").read_text().splitlines()
        if "voluntary" in line
    ]


# --- the front dies ---------------------------------------------------------------------------------------------------


def front_dies(mode: str, environ: dict[str, str] | None = None) -> None:
    """Kill a front whose engine is in the state ``mode``; the engine ends by itself, soon."""
    front = subprocess.Popen(
        [sys.executable, "-m", "tests.engines.small_front", mode],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        env=environ,
    )
    with front:
        assert front.stdout is not None
        pid = int(front.stdout.readline())
        front.kill()
    deadline = time.monotonic() + LIMIT
    while exists(pid) and "zombie" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline, f"engine {pid} outlives its front"
        time.sleep(0.01)


@linux
@pytest.mark.parametrize("mode", ["spawned", "loading", "streaming", "restart"])
def test_an_engine_does_not_outlive_its_front(mode):
    front_dies(mode)


@linux
@pytest.mark.parametrize(
    "without",
    ["lifeline._PR_SET_PDEATHSIG = 0x7FFF", "lifeline.watch_socket = lambda fd: None"],
    ids=["by the lifeline alone", "by the parent-death signal alone"],
)
def test_either_of_the_two_mechanisms_is_enough_even_where_a_step_hangs(planted, without):
    plant(planted, without + "\n")
    front_dies("hanging", planted)


@linux
def test_a_front_that_was_started_with_sigchld_ignored_still_notices_deaths():
    """A shell or a container's first process may hand it down; the kernel then throws exit statuses away."""
    command = f"trap '' CHLD; exec {sys.executable} -m tests.engines.small_front restart"
    with subprocess.Popen(["/bin/sh", "-c", command], cwd=ROOT, stdout=subprocess.PIPE) as front:
        assert front.stdout is not None
        assert int(front.stdout.readline()) > 0, "the second engine is ready"
        front.kill()
