"""How a child's end becomes known: a real wait status, told once, in the loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

_STATUS_UNKNOWN = 255 << 8
"""A wait status that says "exited with 255", as a shell does for what it cannot tell."""
RESET_SIGNALS = (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1)
"""What a child gets back in its default form, whatever the front does with it."""


@dataclass(frozen=True)
class ExitStatus:
    """How a process ended: ``code`` as ``os.waitstatus_to_exitcode`` gives it (negative: a signal)."""

    code: int
    last_line: str
    what: str = "the engine"
    oom: bool = False
    """The kernel ended it because memory ran out."""

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
        if self.oom:
            how += " since memory ran out (a smaller context or fewer slots need less)"
        return f"{self.what} {how}" + (f": {self.last_line}" if self.last_line else "")


class ExitWatch:
    """Calls ``on_exit`` once with a real exit code. Readiness of the pidfd only makes us ask: others have killed healthy
    engines on a sentinel's word. ``before_reap`` is called while the process's number still belongs to it.
    """

    def __init__(
        self, pid: int, name: str, on_exit: Callable[[int], None], *, before_reap: Callable[[], None] = lambda: None
    ) -> None:
        self._pid = pid
        self._on_exit = on_exit
        self._before_reap = before_reap
        self._loop = asyncio.get_running_loop()
        self.exited = False
        try:
            self._pidfd = os.pidfd_open(pid)
        except (AttributeError, OSError):  # not Linux, or a sandbox that forbids it
            threading.Thread(target=self._wait_in_thread, name=f"wait {name}", daemon=True).start()
        else:
            self._loop.add_reader(self._pidfd, self._ask_status)

    def _ask_status(self) -> None:
        if not self._is_over():
            return
        self._before_reap()
        _, status = _wait(self._pid, 0)
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._end(status)

    def _is_over(self) -> bool:
        try:
            return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True  # somebody else took the status

    def _wait_in_thread(self) -> None:
        if hasattr(os, "waitid"):
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
            self._loop.call_soon_threadsafe(self._reap)
        else:  # macOS before Python 3.13: the number is given up a moment too early
            self._loop.call_soon_threadsafe(self._end_late, _wait(self._pid, 0)[1])

    def _reap(self) -> None:
        self._before_reap()
        self._end(_wait(self._pid, 0)[1])

    def _end_late(self, status: int) -> None:
        self._before_reap()
        self._end(status)

    def _end(self, status: int) -> None:
        self.exited = True
        self._on_exit(os.waitstatus_to_exitcode(status))


def _wait(pid: int, options: int) -> tuple[int, int]:
    """``os.waitpid``; where someone else took the status (an ignored SIGCHLD does), the exit is all that is known."""
    try:
        return os.waitpid(pid, options)
    except ChildProcessError:
        return pid, _STATUS_UNKNOWN
