"""Child: a command that we run for a model, with everything that it starts: spawn, signals, exit status, last words."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slimproc import logs
from slimproc.replicas.exits import RESET_SIGNALS, ExitStatus, ExitWatch
from slimproc.replicas.last_words import LastWords
from slimproc.upstream import guard

log = logs.get("slimproc.upstream.output")

_FIRST_FREE_FD = 64
"""Sources are moved above the numbers that the child is given, so that no DUP2 overwrites the next one's source."""
_GUARD_LIMIT = 2.0
"""Seconds that the guard has to kill what it guards before it is killed with its group."""


class Child:
    """Runs in a session of its own under a guard (``guard.py``) and ends, with all that it started, when we do.

    ``on_exit`` is called once, in the loop, when it has ended and its group has been killed.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        environ: Mapping[str, str],
        on_exit: Callable[[ExitStatus], None],
        *,
        what: str,
        cwd: str = "",
        keep: bool = False,
    ) -> None:
        """Spawn, with exactly ``environ``. ``what``: how its end is told of ("the server").

        ``keep``: what it leaves behind when it ends well by itself is left alone. Raises OSError, and then nothing is
        left over.
        """
        self._name = name
        self._what = what
        self._on_exit = on_exit
        self._keep = keep
        self._loop = asyncio.get_running_loop()
        self._lifeline: int | None = None
        self._killing: asyncio.TimerHandle | None = None
        with contextlib.ExitStack() as undo:
            self._start([*argv], environ, cwd, undo)
            undo.pop_all()
        self._exit = ExitWatch(self.pid, name, self._ended, before_reap=self._kill_rest)

    def _start(self, argv: list[str], environ: Mapping[str, str], cwd: str, undo: contextlib.ExitStack) -> None:
        with contextlib.ExitStack() as theirs:
            words, output = os.pipe()
            theirs.callback(os.close, output)
            self._words = undo.enter_context(contextlib.closing(LastWords(words, self._name, log)))
            line, self._lifeline = os.pipe()
            theirs.callback(os.close, line)
            undo.callback(self._cut_lifeline)
            moved: list[int] = []
            for fd in (line, output):
                moved.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD))
                theirs.callback(os.close, moved[-1])
            script = str(Path(guard.__file__).resolve())
            self.pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", script, "keep" if self._keep else "end", cwd, *argv],
                dict(environ),
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, moved[1], 1),
                    (os.POSIX_SPAWN_DUP2, moved[1], 2),
                    (os.POSIX_SPAWN_DUP2, moved[0], guard.LIFELINE),
                ],
                setsid=True,
                setsigdef=RESET_SIGNALS,
                setsigmask=(),
            )

    # --- its end ------------------------------------------------------------------------------------------------------

    @property
    def exited(self) -> bool:
        return self._exit.exited

    def terminate(self) -> None:
        """SIGTERM to its whole group, unless that is gone (its number may be somebody else's by now)."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """All that it started, by the guard; and the guard with its group, should it not do it."""
        if not self.exited and self._killing is None:
            self._keep = False
            self._cut_lifeline()
            self._killing = self._loop.call_later(_GUARD_LIMIT, self._signal, signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if not self.exited:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says EPERM of a group of zombies
                os.killpg(self.pid, number)

    def _kill_rest(self) -> None:
        if not self._keep:
            self._signal(signal.SIGKILL)

    def _ended(self, code: int) -> None:
        if self._killing is not None:
            self._killing.cancel()
        self._cut_lifeline()
        self._words.read_what_is_left()
        self._on_exit(ExitStatus(code, self._words.last_line, self._what))

    def _cut_lifeline(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    @property
    def last_line(self) -> str:
        return self._words.last_line

    def close(self) -> None:
        """Give everything back, after its exit. What it left running loses its standard output."""
        self._words.close()
