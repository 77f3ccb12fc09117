"""An engine must not outlive its front. Two mechanisms, since each has a hole: the kernel's parent-death signal (Linux;
it follows the thread that spawned us) and a thread that waits for the control socket's other end to close.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1
_FRONT_GONE = 3


def tie_to_parent(parent: int) -> None:
    """Die with the process ``parent``. Exits at once if it is gone already (it may have died before we asked)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(_FRONT_GONE)


def watch_socket(fd: int) -> None:
    """End the process when the other end of ``fd`` closes, also in the middle of a long native call."""

    def wait() -> None:
        poll = select.poll()
        poll.register(fd, 0)  # hang-up is reported unasked; nothing else wakes us
        while not any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll()):
            pass
        os._exit(0)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
