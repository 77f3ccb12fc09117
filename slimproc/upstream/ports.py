"""Ports of this machine: one that is free, and who listens on it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"
_LISTEN = "0A"
"""The state in ``/proc/net/tcp``."""


def free_port() -> int:
    """A port on which nobody listens now, on 127.0.0.1 or on all addresses. Whoever takes it first has it. Raises OSError."""
    with socket.socket() as trial:
        trial.bind((LOOPBACK, 0))
        port: int = trial.getsockname()[1]
        return port


def listens(session: int, port: int) -> bool | None:
    """Whether a process of ``session`` listens on ``port``. None: that cannot be told here. Takes milliseconds."""
    if not Path("/proc/net/tcp").exists():
        return None
    wanted = {f"socket:[{inode}]" for inode in _listening(port)}
    return bool(wanted) and any(wanted & _descriptors(pid) for pid in _members(session))


def _listening(port: int) -> set[str]:
    """The inodes of sockets that listen on it."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found


def _members(session: int) -> list[int]:
    try:
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    except OSError:
        return []
    found = []
    for pid in pids:
        try:
            if os.getsid(pid) == session:
                found.append(pid)
        except OSError:
            continue
    return found


def _descriptors(pid: int) -> set[str]:
    found = set()
    try:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            found.add(str(path.readlink()))
    except OSError:
        pass
    return found
