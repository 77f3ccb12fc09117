"""EngineProcess: one incarnation of an engine as the operating system sees it: spawn, signals, exit status, last words."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Mapping

from slimproc import logs
from slimproc.ipc.control import ControlSocket
from slimproc.ipc.credit import create_credit
from slimproc.ipc.ring import RingReader, create_region
from slimproc.replicas.exits import RESET_SIGNALS, ExitStatus, ExitWatch
from slimproc.replicas.last_words import LastWords
from slimproc.replicas.oom import OomKills

log = logs.get("slimproc.engine")

_FIRST_FREE_FD = 64
"""Sources are moved above the numbers that the engine is given, so that no DUP2 overwrites the next one's source."""


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
        self._killed = False
        """By us."""
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
            words, stderr = os.pipe()
            theirs.callback(os.close, stderr)
            self._words = undo.enter_context(contextlib.closing(LastWords(words, self.name, log)))
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
                setsigdef=RESET_SIGNALS,
                setsigmask=(),
            )
        data.close_writer()
        space.close_reader()

    # --- death --------------------------------------------------------------------------------------------------

    def watch_exit(self, on_exit: Callable[[ExitStatus], None], oom_kills: OomKills | None = None) -> None:
        """Call back once, in the loop. Without ``oom_kills`` nobody asks whether memory ran out."""

        def tell(code: int) -> None:
            self._words.read_what_is_left()
            killed = code == -signal.SIGKILL and not self._killed
            oom = killed and oom_kills is not None and oom_kills.explains_one()
            on_exit(ExitStatus(code, self.last_line, oom=oom))

        self._exit = ExitWatch(self.pid, self.name, tell)

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has been reaped (its number may be someone else's by now)."""
        if not self._exit.exited:
            self._killed = self._killed or number == signal.SIGKILL
            os.kill(self.pid, number)

    @property
    def last_line(self) -> str:
        return self._words.last_line

    @property
    def last_lines(self) -> list[str]:
        return self._words.last_lines

    # --- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give everything back. Only after the exit was seen: nothing of a dead engine is used again."""
        self._shared.close()
