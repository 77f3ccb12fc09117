"""How much memory the control groups (v2 and v1) that we are in leave us. Containers and systemd's units set such limits."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final, NamedTuple

from slimproc import cgroups

_UNLIMITED: Final = 1 << 60
"""v1 says 2^63 less a page where there is no limit."""


class Limit(NamedTuple):
    """Bytes: at most so many, of which so many are not in use."""

    total: int
    free: int


class _Names(NamedTuple):
    """How one version calls its files. ``cache``: the lines of memory.stat with pages of files that the kernel can drop.
    (Shared memory is no such file, and not in them.)
    """

    limits: tuple[str, ...]
    usage: str
    cache: frozenset[bytes]


_V2: Final = _Names(("memory.max", "memory.high"), "memory.current", frozenset({b"active_file", b"inactive_file"}))
_V1: Final = _Names(
    ("memory.limit_in_bytes",), "memory.usage_in_bytes", frozenset({b"total_active_file", b"total_inactive_file"})
)


def limits(root: Path = cgroups.ROOT) -> list[Limit]:
    """Every limit that holds for this process: its own group's and those of all groups around it. A soft limit
    (``memory.high``) counts as one, since beyond it the kernel slows us down without end.
    """
    found = []
    for version, folder in cgroups.groups("memory", root):
        names = _V2 if version == 2 else _V1
        given = [_number(f"{folder}/{name}") for name in names.limits]
        total = min((limit for limit in given if limit is not None), default=_UNLIMITED)
        usage = _number(f"{folder}/{names.usage}") if total < _UNLIMITED else None
        if usage is not None:
            # Pages of files count as used, and yet the kernel would rather drop them than refuse us. Those of a model
            # that is in use are active; they are given back as well, as MemAvailable does: the ledger takes files off itself.
            used = max(0, usage - _cache(f"{folder}/memory.stat", names.cache))
            found.append(Limit(total, max(0, total - used)))
    return found


def _number(file: str) -> int | None:
    """None: there is no such file, or no limit (``max``)."""
    with contextlib.suppress(OSError, ValueError):
        return int(_read(file))
    return None


def _cache(file: str, names: frozenset[bytes]) -> int:
    found = 0
    with contextlib.suppress(OSError, ValueError):
        for line in _read(file).splitlines():
            key, _, value = line.partition(b" ")
            if key in names:
                found += int(value)
    return found


def _read(file: str) -> bytes:
    """All of it, in one call: a third of what an opened stream costs, and it is done four times a second."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 1 << 16)
    finally:
        os.close(descriptor)
