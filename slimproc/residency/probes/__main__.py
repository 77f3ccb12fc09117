"""The probe: ``python -m slimproc.residency.probes PARENT HOST_LIMIT ANEW``, started by the front and by nobody else.

It writes a sample as a line to stdout, four times a second or, where nothing can change that anybody asks about, once. A
line on stdin says whom to watch, and brings the next sample at once. It ends when stdin does.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path
from typing import Final, NoReturn

from slimproc.residency.probes import host, processes
from slimproc.residency.probes.lines import ABSENT, EXIT_ANEW, Line, decode_watch, encode
from slimproc.residency.probes.nvml import Gpus, NeedsNewProcess
from slimproc.residency.probes.shares import Shares
from slimproc.residency.views import HOST

_BUSY: Final = 0.25
"""Seconds between two samples."""
_IDLE: Final = 1.0
_SHORTEST: Final = 0.02
"""Between two samples, however often the front changes its mind."""
_FRONT_GONE: Final = 0
_PR_SET_PDEATHSIG: Final = 1


class FrontGone(Exception):
    """Nobody is there any more to sample for."""


class Front:
    """The other end of both pipes."""

    def __init__(self) -> None:
        self._output = os.dup(1)
        os.dup2(2, 1)  # what a library prints must not come between the lines
        self._partial = b""
        self.leaders: frozenset[int] = frozenset()

    @property
    def takes(self) -> bool:
        """False while the pipe is full: a line that waits there would be old when it is read."""
        return bool(select.select([], [self._output], [], 0)[1])

    def write(self, line: bytes) -> None:
        """Raises FrontGone."""
        try:
            while line:
                line = line[os.write(self._output, line) :]
        except BrokenPipeError:
            raise FrontGone from None

    def hear(self, seconds: float) -> bool:
        """Wait so long for a word from it. True: ``leaders`` may be other ones. Raises FrontGone."""
        if not select.select([0], [], [], max(0.0, seconds))[0]:
            return False
        data = os.read(0, 1 << 16)
        if not data:
            raise FrontGone
        *lines, self._partial = (self._partial + data).split(b"\n")
        if lines:
            self.leaders = decode_watch(lines[-1])
        return bool(lines)


def run(front: Front, gpus: Gpus, host_limit: int | None) -> NoReturn:
    """Sample until FrontGone or NeedsNewProcess is raised."""
    shares = Shares()
    while True:
        began = time.monotonic()
        interval = _BUSY
        if front.takes:
            line = sample(front.leaders, gpus, host_limit, shares)
            front.write(encode(line))
            if not front.leaders and line.driver == ABSENT:
                interval = _IDLE
        due = began + interval
        while (left := due - time.monotonic()) > 0:
            if front.hear(left):
                due = min(due, began + _SHORTEST)


def sample(leaders: frozenset[int], gpus: Gpus, host_limit: int | None, shares: Shares) -> Line:
    """Taken when it was begun: nothing that came later is certain to be in it."""
    taken = time.monotonic()
    shares.keep(leaders)
    trees = processes.read(leaders, shares.of_tree)
    machine = host.sample_with(trees, host_limit)
    reading = gpus.sample(trees, machine)
    return Line(taken, {HOST: machine, **reading.devices}, reading.driver, reading.unnamed)


def main(parent: int, host_limit: int, anew: int) -> int:
    """The exit status."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return _FRONT_GONE
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the front
    os.closerange(3, max(int(entry.name) for entry in Path("/dev/fd").iterdir()) + 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        run(Front(), Gpus(anew=bool(anew)), host_limit or None)
    except FrontGone:
        return _FRONT_GONE
    except NeedsNewProcess:
        return EXIT_ANEW


if __name__ == "__main__":
    status = main(*map(int, sys.argv[1:]))
    sys.stderr.flush()
    os._exit(status)  # without the library's own exit handlers, which may hang as its calls do
