"""The machine's own memory as a device: what there is, what is free, and what our processes have of it.

The probe uses it, and so does the front while there is no probe: it is quick and waits for nobody.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from pathlib import Path

from slimproc.residency.probes import cgroup, processes
from slimproc.residency.probes.processes import OfTree, Trees
from slimproc.residency.probes.shares import Shares
from slimproc.residency.views import DeviceSample


def sample_host(
    leaders: Collection[int], host_limit: int | None, *, of_tree: OfTree | None = None, root: Path = Path("/")
) -> DeviceSample:
    """The host now. ``leaders``: of the process trees that are ours. ``host_limit``: bytes that all of them together may
    have. ``of_tree``: see ``processes``; None: the kernel is asked, which may take some tenths of a second.
    ``root``: where proc and sys are.
    """
    return sample_with(processes.read(leaders, of_tree or Shares().of_tree), host_limit, root=root)


def sample_with(trees: Trees, host_limit: int | None, *, root: Path = Path("/")) -> DeviceSample:
    """The same with trees that have been read already.

    Free is what could be had without swapping; pages of files that can be dropped count as free, also against a
    control group's limit. Against ``host_limit`` only our trees' private bytes count: it is a bound on slimproc, and
    others on this machine have nothing to do with it.
    """
    total, free = _memory(root)
    for limit in cgroup.limits(root):
        total, free = min(total, limit.total), min(free, limit.free)
    if host_limit is not None:
        ours = sum(mine.private for mine in trees.bytes.values())
        total, free = min(total, host_limit), min(free, host_limit - ours)
    return DeviceSample(
        kind="host",
        name="host memory",
        total=total,
        free=max(0, min(free, total)),
        attributed={leader: mine.private for leader, mine in trees.bytes.items()},
        mapped={leader: mine.mapped for leader, mine in trees.bytes.items() if mine.mapped},
    )


def _memory(root: Path) -> tuple[int, int]:
    """Total and free bytes of the machine."""
    try:
        lines = (root / "proc/meminfo").read_bytes().splitlines()
        table = {key: int(rest.split()[0]) << 10 for key, _, rest in (line.partition(b":") for line in lines)}
        return table[b"MemTotal"], table.get(b"MemAvailable", table[b"MemFree"])
    except (OSError, ValueError, LookupError):
        return _memory_without_proc()


def _memory_without_proc() -> tuple[int, int]:
    """Not Linux; or /proc is hidden from us (systemd's ProcSubset=pid), and then free does not count the page cache."""
    if sys.platform == "linux":
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
    import psutil  # noqa: PLC0415  # Linux needs none of it

    memory = psutil.virtual_memory()
    return memory.total, memory.available
