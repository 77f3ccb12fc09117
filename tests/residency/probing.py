"""A probe without a server: started with any environment, its lines read and checked as the front does it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import slimproc
from slimproc.residency.probes.lines import Line, decode_line, watch_line
from tests.serving import LIMIT


class Probe:
    """Use as a context manager."""

    def __init__(self, environ: dict[str, str] | None = None, *, host_limit: int = 0, anew: bool = False) -> None:
        package = str(Path(slimproc.__file__).parents[1])
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "slimproc.residency.probes", *map(str, (os.getpid(), host_limit, int(anew)))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": package, **(environ or {})},
            start_new_session=True,
        )
        self._buffer = b""

    def watch(self, *leaders: int) -> None:
        self.process.stdin.write(watch_line(leaders))
        self.process.stdin.flush()

    def line(self) -> Line:
        """The next line; an assertion when the probe ends, or says nothing in time."""
        deadline = time.monotonic() + LIMIT
        while b"\n" not in self._buffer:
            ready = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]
            assert ready, "the probe says nothing"
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            assert data, f"the probe ended: {self.process.wait()} {self.process.stderr.read().decode()}"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return decode_line(line, now=time.monotonic())

    def until(self, condition: Callable[[Line], object], what: str) -> Line:
        """The first line of which ``condition`` is true."""
        deadline = time.monotonic() + LIMIT
        while True:
            line = self.line()
            if condition(line):
                return line
            assert time.monotonic() < deadline, f"{what} (last: {line})"

    def exit(self) -> tuple[int, str]:
        """Wait for its end: status and what it had to say."""
        _, errors = self.process.communicate(timeout=LIMIT)
        return self.process.returncode, errors.decode()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe:
                pipe.close()


class Holder:
    """A process group: a leader, and a child of it that allocates anonymous bytes and maps a file, and then waits."""

    _LEADER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]], stdin=subprocess.PIPE)
sys.stdin.read()
child.stdin.close()
child.wait()
"""
    _CHILD = """
import mmap, os, sys
held = bytearray(os.urandom(1 << 20) * int(sys.argv[1]))
if len(sys.argv) > 2:
    with open(sys.argv[2], "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    touched = sum(mapped[::4096])
print(os.getpid(), flush=True)
sys.stdin.read()
"""

    def __init__(self, mebibytes: int = 0, file: Path | None = None) -> None:
        arguments = [str(mebibytes), *([str(file)] if file else [])]
        self.process = subprocess.Popen(
            [sys.executable, "-c", self._LEADER, self._CHILD, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.leader = self.process.pid
        self.child = int(self.process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        self.process.wait(LIMIT)
        self.process.stdout.close()
