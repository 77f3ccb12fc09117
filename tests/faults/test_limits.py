"""The machine gives no more: descriptors, room on the disk, memory."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import models
from tests.faults.leftovers import Leftovers
from tests.faults.planted import plant
from tests.serving import ServerProcess, fake, script, wait_until

pytestmark = pytest.mark.slow

# --- descriptors ------------------------------------------------------------------------------------------------------


def test_a_front_without_descriptors_serves_who_is_there_and_takes_more_when_others_leave(serve):
    server = serve(
        fake(slots=2, context=1_000_000), wrapper=("sh", "-c", 'ulimit -n 128 && exec "$@"', "sh")
    )  # fmt: skip
    leftovers = Leftovers(server)
    known = server.connect()
    known.request("GET", "/healthz")
    known.getresponse().read()
    with server.stream(script(token_latency=0.01), max_tokens=900_000) as stream:
        stream.take(1)
        crowd = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
        wait_until(lambda: psutil.Process(server.process.pid).num_fds() >= 120, "there are hardly any left")
        known.request("POST", "/v1/completions", b'{"prompt":"hi","max_tokens":1}')
        assert known.getresponse().read().count(b"tok0") == 1
        assert len(stream.take(5)) == 5
        for sock in crowd:
            sock.close()

        def answered() -> bool:
            with contextlib.suppress(OSError):  # it may be turned away until the others' ends have been seen
                return server.complete("hi", max_tokens=1).status == 200
            return False

        wait_until(answered, "somebody new is served")
    known.close()
    leftovers.assert_none()


def test_an_engine_that_dies_while_there_are_no_descriptors_is_started_when_there_are(serve):
    server = serve(fake(), wrapper=("sh", "-c", 'ulimit -n 128 && exec "$@"', "sh"))
    leftovers = Leftovers(server)
    pid = server.replica()["pid"]
    crowd = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    wait_until(lambda: psutil.Process(server.process.pid).num_fds() >= 120, "there are hardly any left")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: "could not be started" in server.log, "the next one cannot be started")
    for sock in crowd:
        sock.close()
    server.wait_ready()
    leftovers.assert_none()


# --- the disk -----------------------------------------------------------------------------------------------------------


def mounted(directory: Path, options: str) -> tuple[str, ...]:
    """A command that runs the server where ``directory`` is a small file system of its own. Skips where none can be."""
    directory.mkdir()
    unshare = ("unshare", "-m", "sh", "-c", f'mount -t tmpfs -o {options} none {directory} && exec "$@"', "sh")
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        subprocess.run([*unshare, "true"], check=True, capture_output=True)
        return unshare
    pytest.skip("NOT TESTED: a full or read-only state directory, since this machine lets us mount nothing")


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a file system")
@pytest.mark.parametrize("options", ["ro", "size=4k,nr_inodes=1"], ids=["read-only", "full"])
def test_a_state_directory_that_takes_nothing_is_warned_of_and_serving_goes_on(tmp_path, options):
    state = tmp_path / "state"
    wrapper = mounted(state, options)
    path = models.tiny_random(tmp_path / "model.gguf")
    config = {"models": {"tiny": {"backend": "llama_cpp", "path": str(path), "threads": 1, "ttl": 3}}}
    config |= {"state_dir": str(state / "slimproc")}
    with ServerProcess(tmp_path / "server", config, wrapper=wrapper) as server:
        assert server.wait_ready().complete("a", max_tokens=200).status == 200
        wait_until(lambda: server.metric("memory_bytes", device="host", kind="held") > 0, "it is seen what it needs")
        wait_until(lambda: server.replica()["state"] == "stopped", "its ttl has passed, so that this is to be kept")
        wait_until(lambda: "a measured profile could not be kept" in server.log, "it is told that it was not")
        assert server.metric("profile_write_failures_total") >= 1
        assert server.complete("a", max_tokens=2).status == 200
        assert server.stop() == 0
        assert "Traceback" not in server.log


# --- memory -------------------------------------------------------------------------------------------------------------


class MemoryGroup:
    """A memory cgroup, of either version. Skips where none can be made."""

    def __init__(self) -> None:
        name = f"slimproc-test-{os.getpid()}"
        for root, self._limit, self._usage in (
            (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
            (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
        ):
            self.folder = root / name
            with contextlib.suppress(OSError):
                self.folder.mkdir()
                if (self.folder / self._limit).exists():
                    return
                self.folder.rmdir()
        pytest.skip("NOT TESTED: the kernel's choice when memory runs out, since no memory cgroup can be made here")

    @property
    def wrapper(self) -> tuple[str, ...]:
        return ("sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh")

    def leave(self, spare: int) -> None:
        """Let its processes have so many bytes more than now, and no swap."""
        (self.folder / self._limit).write_text(str(int((self.folder / self._usage).read_text()) + spare))
        with contextlib.suppress(OSError):
            (self.folder / "memory.swap.max").write_text("0")
        with contextlib.suppress(OSError):
            (self.folder / "memory.swappiness").write_text("0")

    def remove(self) -> None:
        def removed() -> bool:
            with contextlib.suppress(OSError):
                self.folder.rmdir()
            return not self.folder.exists()

        wait_until(removed, "the group is empty")


@pytest.fixture
def group():
    """Removed when the servers in it are gone: a test names it before ``serve``."""
    made = MemoryGroup()
    yield made
    made.remove()


@pytest.mark.skipif(sys.platform != "linux", reason="needs a cgroup")
def test_the_kernel_ends_an_engine_and_not_the_front_when_memory_runs_out_and_the_reason_says_so(
    group, serve, tmp_path
):
    server = serve(fake(context=1_000_000) | {"log_json": True}, wrapper=group.wrapper, **plant(tmp_path))
    leftovers = Leftovers(server)
    group.leave(512 << 20)  # enough for another engine, when this one is gone
    with server.stream(script(token_latency=0.01), max_tokens=900_000) as stream:
        stream.take(2)
        server.kill_engine(number=signal.SIGIO)  # it takes all that it can get
        *_, error, done = stream.events()
    assert (error["error"]["code"], done) == ("engine_crashed", "[DONE]")
    assert "memory ran out (a smaller context or fewer slots need less)" in error["error"]["message"]
    assert server.metric("engine_restarts_total", reason="oom") == 1
    assert server.records("an engine is lost", kind="oom")
    server.wait_ready()

    server.kill_engine()  # by hand: the same signal, and nothing about memory
    wait_until(lambda: server.metric("engine_restarts_total", reason="exited") == 1, "it counts as a plain death")
    assert server.metric("engine_restarts_total", reason="oom") == 1
    leftovers.assert_none()
