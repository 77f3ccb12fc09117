"""Ports of this machine: one that is free, and whose a port is that somebody listens on."""

from __future__ import annotations

import enum
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LOOPBACK = "127.0.0.1"
_LISTEN = "0A"
"""The state in ``/proc/net/tcp``."""
_DEEPEST = 64
"""Parents of a process that are looked at."""


class Owner(enum.Enum):
    """Who listens, as seen from a server that we started."""

    OURS = "ours"
    """It does, or something that it has started."""
    STRANGER = "stranger"
    """We ourselves, or something that we started for something else."""
    OLDER = "older"
    """Somebody who was there before it: most likely a stranger, but the port of a container may be held so as well."""
    UNSEEN = "unseen"
    """That cannot be told: somebody whose descriptors we may not see, or who is younger and no child of its, as where it
    has a container started.
    """


class Ports:
    """Gives ports to servers that we start. None is given to a second one as long as the first may still want it."""

    def __init__(self) -> None:
        self._given: set[int] = set()

    def take(self) -> int:
        """A port on which nobody listens now. Raises OSError."""
        for _ in range(100):
            port = free_port()
            if port not in self._given:
                break
        self._given.add(port)
        return port

    def give_back(self, port: int) -> None:
        self._given.discard(port)


def free_port() -> int:
    """A port on which nobody listens now, on 127.0.0.1 or on all addresses. Whoever takes it first has it. Raises OSError."""
    with socket.socket() as trial:
        trial.bind((LOOPBACK, 0))
        port: int = trial.getsockname()[1]
        return port


def owner(leader: int, port: int) -> Owner:
    """Whose ``port`` is, for a server under the guard ``leader``, a child of ours. Takes milliseconds."""
    wanted = {f"socket:[{inode}]" for inode in _listening(port)}
    own = _process(leader)
    if not wanted or own is None:
        return Owner.UNSEEN
    pids = sorted(_pids(), key=lambda pid: not _is_in(leader, pid))  # mostly it is one of its own
    found = set()
    for pid in pids:
        if wanted & _descriptors(pid):
            found.add(_relation(pid, leader, own))
            if Owner.OURS in found:
                return Owner.OURS
    return next((each for each in (Owner.STRANGER, Owner.OLDER) if each in found), Owner.UNSEEN)


class _Process(NamedTuple):
    parent: int
    session: int
    started: int
    """In the system's ticks since it was started itself."""


def _relation(pid: int, leader: int, own: _Process) -> Owner:
    listener = _process(pid)
    if listener is None:
        return Owner.UNSEEN
    if leader in (pid, listener.session) or leader in _ancestors(listener):
        return Owner.OURS
    if os.getpid() in (pid, *_ancestors(listener)):
        return Owner.STRANGER
    return Owner.OLDER if listener.started < own.started else Owner.UNSEEN


def _is_in(session: int, pid: int) -> bool:
    try:
        return os.getsid(pid) == session
    except OSError:
        return False


def _ancestors(process: _Process) -> Iterator[int]:
    for _ in range(_DEEPEST):
        yield process.parent
        parent = _process(process.parent)
        if parent is None:
            return
        process = parent


def _process(pid: int) -> _Process | None:
    """None: it is gone, or there is no ``/proc``."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return _Process(parent=int(fields[1]), session=int(fields[3]), started=int(fields[19]))


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


def _pids() -> list[int]:
    try:
        return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    except OSError:
        return []


def _descriptors(pid: int) -> set[str]:
    """Of a process that may be looked at: else none."""
    found = set()
    try:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            found.add(str(path.readlink()))
    except OSError:
        pass
    return found
