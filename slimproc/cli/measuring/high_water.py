"""The kernel's own high-water mark of processes: what no sampling, however quick, can miss. Linux only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path


def high_water(pids: Iterable[int]) -> int:
    """The most that each of them had resident since its start or its last ``reset``, private and mapped, summed: bytes.

    0 where the system does not tell.
    """
    return sum(map(_mark, pids))


def _mark(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, LookupError):
        for line in Path(f"/proc/{pid}/status").read_bytes().splitlines():
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) << 10
    return 0


def reset(pids: Iterable[int]) -> bool:
    """Begin anew from what they have now (proc(5), clear_refs). False: the marks of some of them are as they were."""
    try:
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_bytes(b"5")
    except OSError:
        return False
    return True
