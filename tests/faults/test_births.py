"""Engines are born and die two hundred times, and where they cannot be born at all that is said at the start."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from slimproc.replicas.restart import RestartPolicy
from tests.fakes import looped
from tests.faults.leftovers import Leftovers
from tests.replicas.harness import Keeper
from tests.serving import ServerProcess, fake, wait_until

pytestmark = pytest.mark.slow


@pytest.mark.timeout(300)
@looped
async def test_two_hundred_engines_one_after_the_other_leave_no_zombie_descriptor_or_thread():
    """Every second one is killed, the others are asked to stop."""
    me = psutil.Process()
    async with Keeper(policy=RestartPolicy(first_wait=0.0, limit=10_000)) as keeper:
        engine = await keeper.start()
        before = me.num_fds(), me.num_threads(), len(me.children())
        for turn in range(100):
            os.kill(engine.process.pid, signal.SIGKILL)
            engine = await keeper.until_ready(after=engine)
            await keeper.stop(exit_limit=30.0)
            engine = await keeper.start()
            if turn % 10 == 0:
                assert not [one for one in me.children() if one.status() == psutil.STATUS_ZOMBIE]
                assert (me.num_fds(), len(me.children())) <= (before[0], before[2])
        assert me.num_fds() <= before[0]
        assert me.num_threads() <= before[1]
        assert len(me.children()) == before[2]


@pytest.mark.parametrize("size", ["1MiB", "64MiB"])
def test_a_ring_that_can_never_be_had_is_an_error_of_the_start_that_names_its_size_and_the_remedy(tmp_path, size):
    """Where files may have no more than 512 KiB, which goes for shared memory as well."""
    limited = ("sh", "-c", 'ulimit -f 1024 && exec "$@"', "sh")
    with pytest.raises(AssertionError, match="the server ended with 1") as told:
        ServerProcess(tmp_path, fake() | {"ring_size": size}, wrapper=limited)
    wanted = (int(size.removesuffix("MiB")) << 20) + 4096
    assert f"cannot make a ring of {wanted} bytes of shared memory" in str(told.value)
    assert "ulimit -f" in str(told.value)
    assert "Traceback" not in str(told.value)


def alone() -> tuple[str, ...]:
    """A command that runs the server as the first process of a namespace, as a container does. Skips where none can."""
    unshare = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        subprocess.run([*unshare, "true"], check=True, capture_output=True)
        return unshare
    pytest.skip("NOT TESTED: a server as PID 1, since this machine lets us make no namespace")


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_as_the_first_process_of_a_container_it_reaps_its_engines_and_hears_its_signals(tmp_path):
    with ServerProcess(tmp_path, fake() | {"log_json": True}, wrapper=alone()) as server:
        server.wait_ready()
        (front,) = psutil.Process(server.process.pid).children()
        assert Path(f"/proc/{front.pid}/status").read_text().split("NSpid:")[1].split()[1] == "1"

        def engine() -> psutil.Process | None:
            living = [one for one in front.children() if one.status() != psutil.STATUS_ZOMBIE]
            return next((one for one in living if "slimproc.engines" in one.cmdline()), None)

        for number in (signal.SIGKILL, signal.SIGSEGV):
            old = wait_until(engine, "an engine lives")
            old.send_signal(number)
            wait_until(lambda old=old: engine() not in (None, old), "there is another")
            server.wait_ready()
            assert server.complete("hi", max_tokens=1).status == 200
        wait_until(lambda: not [one for one in front.children() if one.status() == psutil.STATUS_ZOMBIE], "all reaped")
        front.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        assert "Traceback" not in server.log


def test_a_server_whose_parent_ignores_its_children_starts_stops_and_restarts_as_any(serve):
    """An ignored SIGCHLD is inherited, and makes whoever waits for a child find none."""
    ignoring = (
        sys.executable, "-c",
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execvp(sys.argv[1], sys.argv[1:])",
    )  # fmt: skip
    server = serve(fake(), wrapper=ignoring)
    leftovers = Leftovers(server)
    pid = server.kill_engine()
    wait_until(lambda: server.replica()["pid"] not in (pid, None), "it is replaced")
    server.wait_ready()
    leftovers.assert_none()
    assert server.stop() == 0
