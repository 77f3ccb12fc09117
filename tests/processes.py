"""Whether a process lives, asked so that it may end while it is asked."""

from __future__ import annotations

import psutil


def lives(process: psutil.Process) -> bool:
    """Neither gone nor a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
