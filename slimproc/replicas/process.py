"""EngineProcess: one incarnation of an engine as the operating system sees it: spawn, signals, exit status, last words."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slimproc import logs
from slimproc.ipc.control import ControlSocket
from slimproc.ipc.credit import create_credit
from slimproc.ipc.ring import RingReader, create_region

log = logs.get("slimproc.engine")

_FIRST_FREE_FD = 64
"""Sources are moved above the numbers that the engine is given, so that no DUP2 overwrites the next one's source."""
_LAST_LINES = 40
_LINE_LIMIT = 1000
_STATUS_UNKNOWN = 255 << 8
"""A wait status that says "exited with 255", as a shell does for what it cannot tell."""
_RESET_SIGNALS = (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1)


@dataclass(frozen=True)
class ExitStatus:
    """How a process ended: ``code`` as ``os.waitstatus_to_exitcode`` gives it (negative: a signal)."""

    code: int
    last_line: str

    @property
    def signal_name(self) -> str | None:
        if self.code >= 0:
            return None
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"

    def __str__(self) -> str:
        how = f"was ended by {self.signal_name}" if self.signal_name else f"exited with {self.code}"
        return f"the engine {how}" + (f": {self.last_line}" if self.last_line else "")


class EngineProcess:
    """A child that was exec'ed, and our ends of all that it shares with us. Made only by the loop's own thread.

    ``os.posix_spawn`` and neither ``subprocess`` nor uvloop's: it does not fork (Metal breaks in a forked child), blocks
    the loop 0.3 ms instead of 2, and nothing becomes inheritable for a moment on the way. The parent-death signal
    follows the thread that spawns, so that thread must be the main one.
    """

    def __init__(self, *, name: str, replica: int, ring_size: int, credit: str, environ: Mapping[str, str]) -> None:
        """Spawn, with exactly ``environ``. Raises OSError, and then nothing is left over."""
        self.name = name
        self.epoch = secrets.randbits(63)
        self._loop = asyncio.get_running_loop()
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._partial = b""
        with contextlib.ExitStack() as undo:
            self._spawn(replica, ring_size, credit, environ, undo)
            self._shared = undo.pop_all()

    def _spawn(
        self, replica: int, ring_size: int, credit: str, environ: Mapping[str, str], undo: contextlib.ExitStack
    ) -> None:
        """``undo`` gets whatever we keep open; what the engine alone may hold is closed here, or the end of file that
        its death makes would be hidden from us.
        """
        with contextlib.ExitStack() as theirs:
            region = create_region(ring_size, epoch=self.epoch, replica=replica, credit=credit)
            undo.callback(os.close, region)
            data, space = (undo.enter_context(contextlib.closing(create_credit(credit))) for _ in range(2))
            self.reader = undo.enter_context(
                contextlib.closing(RingReader(region, data.reader, space.writer, epoch=self.epoch))
            )
            ours, control = socket.socketpair()
            theirs.enter_context(control)
            self.control = undo.enter_context(contextlib.closing(ControlSocket(ours)))
            self._stderr, stderr = os.pipe()
            undo.callback(os.close, self._stderr)
            theirs.callback(os.close, stderr)
            moved: list[int] = []
            for fd in (control.fileno(), region, data.writer_fd, space.reader_fd, stderr):
                moved.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD))
                theirs.callback(os.close, moved[-1])
            self.pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-P", "-m", "slimproc.engines", str(os.getpid()), credit],
                dict(environ),
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, moved[4], 1),
                    (os.POSIX_SPAWN_DUP2, moved[4], 2),
                    *((os.POSIX_SPAWN_DUP2, source, 3 + place) for place, source in enumerate(moved[:4])),
                ],
                setsid=True,
                setsigdef=_RESET_SIGNALS,
                setsigmask=(),
            )
        data.close_writer()
        space.close_reader()
        os.set_blocking(self._stderr, False)
        self._loop.add_reader(self._stderr, self._read_stderr)

    # --- death --------------------------------------------------------------------------------------------------

    def watch_exit(self, on_exit: Callable[[ExitStatus], None]) -> None:
        """Call back once, in the loop, with a real wait status. Readiness of the pidfd only makes us ask: others have
        killed healthy engines on a sentinel's word.
        """
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # not Linux, or a sandbox that forbids it
            threading.Thread(
                target=self._wait_in_thread, args=(on_exit,), name=f"wait {self.name}", daemon=True
            ).start()
        else:
            self._loop.add_reader(self._pidfd, self._ask_status, on_exit)

    def _ask_status(self, on_exit: Callable[[ExitStatus], None]) -> None:
        pid, status = _wait(self.pid, os.WNOHANG)
        if pid:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            on_exit(self._exit_status(status))

    def _wait_in_thread(self, on_exit: Callable[[ExitStatus], None]) -> None:
        _, status = _wait(self.pid, 0)
        self._loop.call_soon_threadsafe(lambda: on_exit(self._exit_status(status)))

    def _exit_status(self, status: int) -> ExitStatus:
        self.exited = True
        while self._read_stderr():
            pass
        return ExitStatus(os.waitstatus_to_exitcode(status), self.last_line)

    exited = False

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has been reaped (its number may be someone else's by now)."""
        if not self.exited:
            os.kill(self.pid, number)

    # --- last words ---------------------------------------------------------------------------------------------

    def _read_stderr(self) -> bool:
        """Take one piece a wake-up, since an engine may write faster than we log. True: there may be more."""
        try:
            data = os.read(self._stderr, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._stderr)
        *lines, self._partial = (self._partial + (data or b"\n")).split(b"\n")
        self._partial = self._partial[-_LINE_LIMIT:]
        for line in lines:
            self._note_line(line)
        return bool(data)

    def _note_line(self, line: bytes) -> None:
        text = line[:_LINE_LIMIT].decode("utf-8", "replace").rstrip()
        if text:
            self._lines.append(text)
            log.info(text, replica=self.name)

    @property
    def last_line(self) -> str:
        return self._lines[-1] if self._lines else ""

    @property
    def last_lines(self) -> list[str]:
        return list(self._lines)

    # --- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give everything back. Only after the exit was seen: nothing of a dead engine is used again."""
        self._loop.remove_reader(self._stderr)
        self._shared.close()


def _wait(pid: int, options: int) -> tuple[int, int]:
    """``os.waitpid``; where someone else took the status (an ignored SIGCHLD does), the exit is all that is known."""
    try:
        return os.waitpid(pid, options)
    except ChildProcessError:
        return pid, _STATUS_UNKNOWN
