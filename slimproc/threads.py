"""How many threads an engine computes with when nobody said: the cores it may use, less the front's share."""

from __future__ import annotations

import os
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(topology: Path = _TOPOLOGY, quota: Path = _QUOTA) -> int:
    """Physical cores among the CPUs this process may run on, at most its container's quota; at least 1.

    Two hyper-threads of a core share the vector units that this work is made of, so a core counts once.
    """
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_siblings(topology / f"cpu{cpu}" / "topology" / "thread_siblings_list", cpu) for cpu in cpus}
    return max(1, min(len(cores), _quota_cpus(quota)))


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


def _quota_cpus(path: Path) -> int:
    """Whole CPUs that the control group may use; very many where it has no limit."""
    try:
        limit, period = path.read_text().split()
        return max(1, int(limit) // int(period))
    except (OSError, ValueError):
        return 1 << 20
