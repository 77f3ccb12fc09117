"""What a fault might leave behind in a server, and what it is held against."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil

from tests.processes import lives
from tests.serving import ServerProcess, wait_until


class Possessions(NamedTuple):
    """What the front has: open descriptors, threads, mapped rings, and processes of its own."""

    descriptors: int
    threads: int
    rings: int
    children: int


_HELPERS = {"slimproc.chat.renderer": 2, "slimproc.residency.probes": 1}
"""Processes that are no engines, by their modules; the probe comes a second after the server."""


def _helpers(server: ServerProcess) -> dict[str, int]:
    commands = [" ".join(child.cmdline()) for child in server.children()]
    return {module: sum(module in command for command in commands) for module in _HELPERS}


def look(server: ServerProcess) -> Possessions:
    front = psutil.Process(server.process.pid)
    maps = Path(f"/proc/{front.pid}/maps").read_text()
    return Possessions(front.num_fds(), front.num_threads(), maps.count("/memfd:"), len(server.children()))


class Leftovers:
    """Looks at a server that is ready and idle, before its fault; ``assert_none`` when the fault is over."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        wait_until(lambda: _helpers(server) == _HELPERS, "the probe and the renderers are there, too")
        self._before = look(server)
        self._held = server.metric("memory_bytes", device="host", kind="held")
        self._front = server.process.pid

    def assert_none(self) -> None:
        """The same process has no more of anything than before, holds as many bytes, and serves."""
        server = self._server
        server.hang_up()
        server.wait_ready()
        server.wait_idle()
        wait_until(self._as_before, f"{look(server)} is no more than {self._before}")
        assert not any(child.status() == psutil.STATUS_ZOMBIE for child in server.children())
        wait_until(lambda: self._held_now() == self._held, f"{self._held} bytes are held, and not {self._held_now()}")
        model = server.replicas()[0]["model"]
        assert server.metric("inflight_requests", model=model) == 0
        assert server.complete("hi", model=model, max_tokens=1).status == 200
        assert server.process.pid == self._front
        assert "Traceback" not in server.log
        assert "never retrieved" not in server.log

    def _held_now(self) -> float:
        return self._server.metric("memory_bytes", device="host", kind="held")

    def _as_before(self) -> bool:
        now = look(self._server)
        return all(count <= before for count, before in zip(now, self._before, strict=True))


def all_gone(processes: list[psutil.Process]) -> None:
    """Wait until none of these lives."""
    wait_until(lambda: not any(map(lives, processes)), f"{processes} are gone")


def ended_once(server: ServerProcess, count: int) -> None:
    """By the server's own records, of a log in JSON: so many requests, each with one end."""
    wait_until(lambda: len(server.records("generation finished")) >= count, f"{count} requests have ended")
    ids = [line["request_id"] for line in server.records("generation finished")]
    assert len(ids) == len(set(ids)) == count
