"""How many threads an engine computes with when nobody said: the cores it may use, less the front's share."""

from __future__ import annotations

import os
from pathlib import Path

from slimproc import cgroups

_TOPOLOGY = "sys/devices/system/cpu"
_UNLIMITED = 1 << 20


def usable_cores(root: Path = cgroups.ROOT) -> int:
    """Physical cores among the CPUs this process may run on, at most the quota of its container or unit; at least 1.

    Two hyper-threads of a core share the vector units that this work is made of, so a core counts once.
    """
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_siblings(root / _TOPOLOGY / f"cpu{cpu}" / "topology" / "thread_siblings_list", cpu) for cpu in cpus}
    return max(1, min([len(cores), *map(_quota_cpus, cgroups.groups("cpu", root))]))


def default_threads(cores: int) -> int:
    """Threads for ``cores`` usable cores: all but one, which is the front's and everybody else's; at least 1.

    The threads meet at a barrier several hundred times a step, so one that has to share its core holds up all of them:
    on two cores beside a busy process two threads gave a tenth to six tenths of what one gave. On an idle machine the
    last core would add its share; who has one sets ``threads``.
    """
    return max(1, cores - 1)


def _siblings(path: Path, cpu: int) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)


def _quota_cpus(group: cgroups.Group) -> int:
    """Whole CPUs that the group may use; very many where it has no limit."""
    files = ("cpu.max",) if group.version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        limit, period = " ".join(Path(group.folder, file).read_text() for file in files).split()
        quota = int(limit) // int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return _UNLIMITED
    return _UNLIMITED if int(limit) < 0 else max(1, quota)
