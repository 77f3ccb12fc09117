"""OomKills: how many processes of our memory cgroup the kernel has ended because memory ran out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from slimproc import cgroups


class OomKills:
    """Tells a SIGKILL of the kernel's from anybody else's: only the kernel's is counted. One for all engines of a front,
    since one kill explains one death.
    """

    def __init__(self, root: Path = cgroups.ROOT) -> None:
        self._file = next((file for file in _files(root) if _count(file) is not None), None)
        self._explained = self._counted

    def explains_one(self) -> bool:
        """Whether the kernel has ended a process that no death was explained by yet; if so, this one is."""
        if self._counted <= self._explained:
            return False
        self._explained += 1
        return True

    @property
    def _counted(self) -> int:
        return 0 if self._file is None else _count(self._file) or 0


def _files(root: Path) -> Iterator[Path]:
    """Where the kernel counts, best first: our own group (engines are in it, too), else the machine.

    cgroup v2 counts for a group and all below it, v1 for each group by itself.
    """
    for version, folder in cgroups.groups("memory", root):
        yield Path(folder, "memory.events" if version == 2 else "memory.oom_control")
    yield root / "proc/vmstat"


def _count(file: Path) -> int | None:
    """The number behind ``oom_kill``; None: there is no such line."""
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None
