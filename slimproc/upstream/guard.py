"""A guard between us and a server that we start: ``python -I -S guard.py MODE CWD ARGV…``. Standard library only.

It leads the server's session, runs ARGV in CWD (empty: where it is) as its child, and ends as that ends, by the same
signal if it was one. Descriptor 3 is a lifeline: when its other end closes, because we are gone or want it so,
everything that came from ARGV is killed, also what has left the process group (on Linux, where it becomes the guard's
child when it is orphaned). MODE ``end`` does the same to what ARGV leaves behind when it ends by itself; ``keep`` leaves that alone:
starting something that stays is what it was run for.

What nothing can help: a descendant in a session of its own outlives a guard that is itself killed by SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time

LIFELINE = 3
_FOR_THE_SERVER = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CANNOT_RUN = 127
"""As a shell says it."""
_ROUNDS, _ROUND = 200, 0.01
"""How often, and in what interval (seconds), is looked whether anything is left that has to be killed."""


def main(mode: str, cwd: str, argv: list[str]) -> None:
    """Never returns."""
    _close_inherited()
    signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_SERVER)
    asked: list[int] = []
    for number in _FOR_THE_SERVER:
        signal.signal(number, lambda number, _: asked.append(number))
    news, wake = os.pipe()
    for end in (news, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        _become(guard, cwd, argv)
    for number in signal.sigpending() & set(_FOR_THE_SERVER):
        os.kill(child, number)  # it came to our group before the child was in it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_THE_SERVER)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    status = _watch(child, news, asked)
    if status is None or mode == "end":
        _kill_all_but_me()
    if status is None:
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        _end_like(status)


def _close_inherited() -> None:
    """All but the standard ones and the lifeline, which the server is not to have either."""
    os.set_inheritable(LIFELINE, False)
    folder = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
    for name in os.listdir(folder):  # noqa: PTH208  # pathlib would double the time that a guard takes to start
        if int(name) > LIFELINE:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(int(name))


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _become(guard: int, cwd: str, argv: list[str]) -> None:
    """In the child. Handlers are gone with exec; a guard that is killed takes the server with it."""
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(_CANNOT_RUN)
        if cwd:
            os.chdir(cwd)
        os.execvp(argv[0], argv)  # noqa: S606  # the operator's own command, and no shell is wanted
    except OSError as error:
        os.write(2, f"cannot run {argv[0]}: {error.strerror}\n".encode(errors="replace"))
    finally:
        os._exit(_CANNOT_RUN)


def _watch(child: int, news: int, asked: list[int]) -> int | None:
    """The child's wait status when it ends, or None when the lifeline is cut before."""
    poll = select.poll()
    poll.register(LIFELINE, 0)  # hang-up is reported unasked; nothing else wakes us
    poll.register(news, select.POLLIN)
    while True:
        with contextlib.suppress(BlockingIOError):
            os.read(news, 4096)
        while asked:
            number = asked.pop()
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(child) != os.getpgrp():  # else it got it as we did
                    os.kill(child, number)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return _CANNOT_RUN << 8
            if pid == child:
                return status
            if pid == 0:
                break
        if any(fd == LIFELINE and event & (select.POLLHUP | select.POLLERR) for fd, event in poll.poll()):
            return None


def _kill_all_but_me() -> None:
    """Everybody in our session, and orphans of ours that have left it; again, until nobody is left."""
    for _ in range(_ROUNDS):
        found = _others()
        if not found:
            return
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_ROUND)


def _others() -> list[int]:
    """Living processes of our session, or with us as their parent. Nobody where there is no ``/proc``."""
    me, found = os.getpid(), []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():  # noqa: PTH112, PTH208  # as above
        if not name.isdigit() or int(name) == me:
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123  # as above
                state, parent, _, session = file.read().rpartition(b")")[2].split()[:4]
        except OSError:
            continue
        if me in (int(parent), int(session)) and state not in (b"Z", b"X"):
            found.append(int(name))
    return found


def _end_like(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with contextlib.suppress(OSError):  # KILL has no form but its own
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
