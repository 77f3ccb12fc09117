"""ProbeProcess: one life of the probe as the front holds it. Nothing here waits for the child, since it may never answer."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Final

from slimproc import logs
from slimproc.replicas.exits import RESET_SIGNALS
from slimproc.residency.probes.lines import LONGEST, BadLine, Line, decode_line, watch_line

log = logs.get("slimproc.probe")

_FIRST_FREE_FD: Final = 64
"""Sources are moved above the numbers that the probe is given, so that no DUP2 overwrites the next one's source."""
_PIECE: Final = 1 << 16
_MOST_PIECES: Final = 16
"""Read in one turn of the loop."""
_LONGEST_TEXT: Final = 1000
_MOST_TEXTS: Final = 50
"""Lines of its stderr that are logged in one life."""
STATUS_UNKNOWN: Final = 255


class ProbeProcess:
    """Made in the loop's thread, which must be the main one: the parent-death signal follows the thread that spawns."""

    def __init__(
        self, environ: Mapping[str, str], host_limit: int | None, *, anew: bool, clock: Callable[[], float]
    ) -> None:
        """Spawn, with exactly ``environ``. Raises OSError, and then nothing is left over."""
        self._clock = clock
        self._partial = b""
        self._error_partial = b""
        self._wanted = self._begun = b""
        self._texts = 0
        self._exit_code: int | None = None
        self.news = asyncio.Event()
        """Set when there may be something to ``read``, or the child has closed its end."""
        self.ended = False
        """Its output is closed: it is dead or about to be."""
        self.bad_lines = 0
        """In a row."""
        self._loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as undo:
            self._spawn(environ, host_limit or 0, int(anew), undo)
            self._pipes = undo.pop_all()
        for fd in (self._input, self._output, self._errors):
            os.set_blocking(fd, False)
        self._loop.add_reader(self._output, self.news.set)
        self._loop.add_reader(self._errors, self._read_errors)

    def _spawn(self, environ: Mapping[str, str], host_limit: int, anew: int, undo: contextlib.ExitStack) -> None:
        with contextlib.ExitStack() as theirs:
            pairs = [os.pipe() for _ in range(3)]
            (stdin, self._input), (self._output, stdout), (self._errors, stderr) = pairs
            moved = []
            for ours, fd in ((self._input, stdin), (self._output, stdout), (self._errors, stderr)):
                undo.callback(os.close, ours)
                theirs.callback(os.close, fd)
            for fd in (stdin, stdout, stderr):
                moved.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD))
                theirs.callback(os.close, moved[-1])
            arguments = map(str, (os.getpid(), host_limit, anew))
            self.pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-P", "-m", "slimproc.residency.probes", *arguments],
                dict(environ),
                file_actions=[(os.POSIX_SPAWN_DUP2, source, place) for place, source in enumerate(moved)],
                setsid=True,
                setsigdef=RESET_SIGNALS,
                setsigmask=(),
            )

    # --- lines ------------------------------------------------------------------------------------------------------

    def watch(self, leaders: Collection[int]) -> None:
        """Tell it whose processes are ours. What its pipe does not take now goes with a later call or ``read``."""
        self._wanted = watch_line(leaders)
        self._flush()

    def _flush(self) -> None:
        """A line that was begun is ended before the next one is; of several that wait, the newest says it all."""
        while self._begun or self._wanted:
            if not self._begun:
                self._begun, self._wanted = self._wanted, b""
            try:
                written = os.write(self._input, self._begun)
            except OSError:  # full, or it is dead: that will be seen elsewhere
                return
            self._begun = self._begun[written:]

    def read(self) -> Line | None:
        """The newest good line that has come; the older ones are out of date. None: there is none."""
        self.news.clear()
        self._flush()
        lines: list[bytes] = []
        for _ in range(_MOST_PIECES):
            try:
                data = os.read(self._output, _PIECE)
            except BlockingIOError:
                break
            if not data:
                self._end()
                break
            *whole, self._partial = (self._partial + data).split(b"\n")
            lines += whole
        if len(self._partial) > LONGEST:
            self.bad_lines += 1
            self._partial = b""
        return self._newest(lines)

    def _newest(self, lines: list[bytes]) -> Line | None:
        now = self._clock()
        bad = 0
        for line in reversed(lines):
            try:
                decoded = decode_line(line[: LONGEST + 1], now=now)
            except BadLine as error:
                bad += 1
                log.warning("the memory probe wrote nonsense", problem=str(error))
            else:
                self.bad_lines = bad
                return decoded
        self.bad_lines += bad
        return None

    def _end(self) -> None:
        self.ended = True
        self._loop.remove_reader(self._output)

    def _read_errors(self) -> None:
        try:
            data = os.read(self._errors, _PIECE)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._errors)
        *lines, self._error_partial = (self._error_partial + (data or b"\n")).split(b"\n")
        self._error_partial = self._error_partial[-_LONGEST_TEXT:]
        for line in lines:
            if (text := line[:_LONGEST_TEXT].decode("utf-8", "replace").rstrip()) and self._texts < _MOST_TEXTS:
                self._texts += 1
                log.warning(text)

    # --- the end ----------------------------------------------------------------------------------------------------

    @property
    def exit_code(self) -> int | None:
        """As ``os.waitstatus_to_exitcode`` has it, once it is known. None: not dead yet, whatever was sent to it."""
        if self._exit_code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else took the status (an ignored SIGCHLD does)
                self._exit_code = STATUS_UNKNOWN
            else:
                if pid:
                    self._exit_code = os.waitstatus_to_exitcode(status)
        return self._exit_code

    def kill(self) -> None:
        if self.exit_code is None:
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Give the pipes back; a probe that still runs ends by that. Its ``exit_code`` can still be asked for."""
        self._read_errors_to_the_end()
        self._loop.remove_reader(self._output)
        self._loop.remove_reader(self._errors)
        self._pipes.close()

    def _read_errors_to_the_end(self) -> None:
        for _ in range(_MOST_PIECES):
            before = self._texts
            self._read_errors()
            if self._texts == before:
                return
