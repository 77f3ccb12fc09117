"""EngineProcess: one incarnation of an engine as the operating system sees it: spawn, signals, exit status, last words."""

from __future__ import annotations

import asyncio
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
from pathlib import Path

from slimproc import logs
from slimproc.ipc.control import ControlSocket
from slimproc.ipc.credit import create_credit
from slimproc.ipc.ring import RingReader, create_region

log = logs.get("slimproc.engine")

_FIRST_FREE_FD = 64
"""Sources are moved above the numbers that the engine is given, so that no DUP2 overwrites the next one's source."""
_LAST_LINES = 40
_LINE_LIMIT = 1000
_NOT_FOR_ENGINES = ("NOTIFY_SOCKET", "WATCHDOG_", "LISTEN_", "CREDENTIALS_DIRECTORY")
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
        """Spawn. Raises OSError, and then nothing is left over."""
        self.name = name
        self.epoch = secrets.randbits(63)
        self._open: list[int] = []
        self._loop = asyncio.get_running_loop()
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._partial = b""
        try:
            self._spawn(replica, ring_size, credit, environ)
        except BaseException:
            self._close_all()
            raise

    def _spawn(self, replica: int, ring_size: int, credit: str, environ: Mapping[str, str]) -> None:
        region = self._keep(create_region(ring_size, epoch=self.epoch, replica=replica, credit=credit))
        data, space = create_credit(credit), create_credit(credit)
        self._credits = (data, space)
        ours, theirs = socket.socketpair()
        self._stderr, stderr_writer = os.pipe()
        os.set_blocking(self._stderr, False)
        given = [theirs.fileno(), region, data.writer_fd, space.reader_fd, stderr_writer]
        moved: list[int] = []
        try:
            moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD) for fd in given]
            self.reader = RingReader(region, data.reader, space.writer, epoch=self.epoch)
            self.pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-P", "-m", "slimproc.engines", str(os.getpid()), credit],
                _engine_environment(environ),
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
        finally:
            # A second holder of the engine's ends would hide its end of file from us.
            for fd in (*moved, stderr_writer):
                os.close(fd)
            theirs.close()
        self.control = ControlSocket(ours)
        data.close_writer()
        space.close_reader()
        self._loop.add_reader(self._stderr, self._read_stderr)

    def _keep(self, fd: int) -> int:
        self._open.append(fd)
        return fd

    # --- death --------------------------------------------------------------------------------------------------

    def watch_exit(self, on_exit: Callable[[ExitStatus], None]) -> None:
        """Call back once, in the loop, with a real wait status. Readiness of the pidfd only makes us ask: others have
        killed healthy engines on a sentinel's word.
        """
        if hasattr(os, "pidfd_open"):
            self._pidfd = os.pidfd_open(self.pid)
            self._loop.add_reader(self._pidfd, self._ask_status, on_exit)
        else:
            threading.Thread(target=self._wait_in_thread, args=(on_exit,), name=f"wait {self.name}", daemon=True).start()

    def _ask_status(self, on_exit: Callable[[ExitStatus], None]) -> None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            on_exit(self._exit_status(status))

    def _wait_in_thread(self, on_exit: Callable[[ExitStatus], None]) -> None:
        _, status = os.waitpid(self.pid, 0)
        self._loop.call_soon_threadsafe(lambda: on_exit(self._exit_status(status)))

    def _exit_status(self, status: int) -> ExitStatus:
        self.exited = True
        self._read_stderr()
        return ExitStatus(os.waitstatus_to_exitcode(status), self.last_line)

    exited = False

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has been reaped (its number may be someone else's by now)."""
        if not self.exited:
            os.kill(self.pid, number)

    # --- last words ---------------------------------------------------------------------------------------------

    def _read_stderr(self) -> None:
        while True:
            try:
                data = os.read(self._stderr, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self._loop.remove_reader(self._stderr)
                if self._partial:
                    self._note_line(self._partial)
                    self._partial = b""
                return
            *lines, self._partial = (self._partial + data).split(b"\n")
            self._partial = self._partial[-_LINE_LIMIT:]
            for line in lines:
                self._note_line(line)

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
        os.close(self._stderr)
        self.control.close()
        self.reader.close()
        for pair in self._credits:
            pair.close()
        self._close_all()

    def _close_all(self) -> None:
        for fd in self._open:
            os.close(fd)
        self._open.clear()


def _engine_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What an engine may know: not the service manager's channels, and our package wherever it is imported from."""
    kept = {key: value for key, value in environ.items() if not key.startswith(_NOT_FOR_ENGINES)}
    package = str(Path(__file__).resolve().parents[2])
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (package, kept.get("PYTHONPATH", ""))))
    kept["GGML_NO_BACKTRACE"] = "1"  # on abort ggml would start a debugger, and print to stdout
    return kept
