"""What a server's processes take: CPU time, and memory now and at most, by what they do."""

from __future__ import annotations

import contextlib
from pathlib import Path

import peers
import psutil

_MIB = 1 << 20


def processes(server: peers.Server) -> dict[str, list[int]]:
    """Pids: of slimproc its ``front``, its ``engines`` and ``others`` (renderers, probe); of any other, ``server``."""
    if not isinstance(server, peers.Slimproc):
        return {"server": [server.process.pid]}
    engines = [found["pid"] for found in server.admin("GET", "/admin/replicas")["replicas"] if found.get("pid")]
    children = [child.pid for child in psutil.Process(server.process.pid).children(recursive=True)]
    others = [pid for pid in children if pid not in engines]
    return {"front": [server.process.pid], "engines": engines, "others": others}


def cpu(server: peers.Server) -> dict[str, float]:
    """CPU seconds so far; what has ended meanwhile no longer counts."""
    return {name: sum(map(_cpu_seconds, pids)) for name, pids in processes(server).items()}


def _cpu_seconds(pid: int) -> float:
    with contextlib.suppress(psutil.NoSuchProcess, OSError):
        return peers._cpu_seconds(pid)
    return 0.0


def memory(server: peers.Server) -> dict[str, dict[str, float]]:
    """MiB: ``rss`` now; ``peak``, the most that it was since the start (Linux; elsewhere what it is now); ``pss`` where
    the system counts it: pages that several processes share are shared out among them.
    """
    found: dict[str, dict[str, float]] = {}
    for name, pids in processes(server).items():
        sums = found[name] = {}
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                for key, value in _memory(pid).items():
                    sums[key] = sums.get(key, 0.0) + value / _MIB
    return found


def rss(pid: int) -> int:
    """Bytes."""
    return int(psutil.Process(pid).memory_info().rss)


def _memory(pid: int) -> dict[str, int]:
    now = rss(pid)
    sizes = {"rss": now, "peak": _kib(pid, "status", "VmHWM") or now}
    if pss := _kib(pid, "smaps_rollup", "Pss"):
        sizes["pss"] = pss
    return sizes


def _kib(pid: int, file: str, key: str) -> int:
    """A line ``Key: 123 kB`` of one of Linux's files, in bytes; 0 where there is none."""
    path = Path(f"/proc/{pid}/{file}")
    if not path.exists():
        return 0
    lines = (line for line in path.read_text().splitlines() if line.startswith(f"{key}:"))
    return next((int(line.split()[1]) << 10 for line in lines), 0)
