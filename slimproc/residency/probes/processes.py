"""Whose memory is whose: the bytes of process trees, each named by its leader, read without looking at any other process."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from slimproc.residency.probes.shares import Bytes, doubtful

_MOST_PROCESSES: Final = 4096
"""Of one tree: a fork bomb must not stop the probe."""
_CHILDREN: Final = Path("/proc/thread-self/children")
"""Some kernels are built without it, and other systems have no /proc."""
_PRIVATE: Final = (b"RssAnon:", b"RssShmem:")
_MAPPED: Final = b"RssFile:"


OfTree = Callable[[int, Mapping[int, Bytes]], Bytes]
"""What a tree has altogether, by its leader and the words of each of its processes, where those may share memory."""


@dataclass(frozen=True)
class Trees:
    """``bytes`` by leader, of those ``leaders`` that are there; ``leader_of`` knows every process that was found."""

    leaders: frozenset[int] = frozenset()
    bytes: Mapping[int, Bytes] = field(default_factory=dict)
    leader_of: Mapping[int, int] = field(default_factory=dict)


def read(leaders: Collection[int], of_tree: OfTree) -> Trees:
    """The trees of ``leaders`` at this moment. A leader that is gone is left out."""
    if not _CHILDREN.exists():
        return read_with_psutil(leaders)
    sums: dict[int, Bytes] = {}
    leader_of: dict[int, int] = {}
    for leader in leaders:
        found = by_process(leader)
        leader_of |= dict.fromkeys(found, leader)
        if found:
            sums[leader] = of_tree(leader, found) if doubtful(found) else _sum(found.values())
    return Trees(frozenset(leaders), sums, leader_of)


def by_process(leader: int) -> dict[int, Bytes]:
    """What each process of a tree says of itself. Linux."""
    return {pid: _status(f"/proc/{pid}/status") for pid in _tree(leader)}


def _sum(found: Iterable[Bytes]) -> Bytes:
    private, mapped = zip(*found, strict=True)
    return Bytes(sum(private), sum(mapped))


def _tree(leader: int) -> list[int]:
    """A process and all that descend from it. Threads have children of their own in /proc."""
    found: list[int] = []
    waiting = [leader]
    seen = {leader}
    while waiting and len(found) < _MOST_PROCESSES:
        pid = waiting.pop()
        try:
            threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208  # half the cost of pathlib's, four times a second
        except OSError:
            continue
        found.append(pid)
        for thread in threads:
            for child in map(int, _read(f"/proc/{pid}/task/{thread}/children").split()):
                if child not in seen:
                    seen.add(child)
                    waiting.append(child)
    return found


def _status(file: str) -> Bytes:
    private = mapped = 0
    for line in _read(file).splitlines():
        if line.startswith(_PRIVATE):
            private += int(line.split()[1]) << 10
        elif line.startswith(_MAPPED):
            mapped = int(line.split()[1]) << 10
    return Bytes(private, mapped)


def _read(file: str) -> bytes:
    """Empty when the process has gone meanwhile."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def read_with_psutil(leaders: Collection[int]) -> Trees:
    """The same where there is no such /proc (macOS). It has to look at all processes to find children."""
    import psutil  # noqa: PLC0415  # a third of the probe's start, and Linux needs none of it

    sums: dict[int, Bytes] = {}
    leader_of: dict[int, int] = {}
    for leader in leaders:
        private = mapped = 0
        with contextlib.suppress(psutil.Error):
            first = psutil.Process(leader)
            for process in [first, *first.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    resident = process.memory_info().rss
                    unique = _unique(process, resident)
                    private += unique
                    mapped += max(0, resident - unique)
                    leader_of[process.pid] = leader
            sums[leader] = Bytes(private, mapped)
    return Trees(frozenset(leaders), sums, leader_of)


def _unique(process: object, resident: int) -> int:
    """What the process alone has, where the system tells us; else all that is resident."""
    import psutil  # noqa: PLC0415

    assert isinstance(process, psutil.Process)
    with contextlib.suppress(psutil.Error, AttributeError):
        return int(process.memory_full_info().uss) if sys.platform != "win32" else resident
    return resident
