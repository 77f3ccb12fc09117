"""What is given to replicas and what they show: limits in, frozen snapshots out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slimproc.replicas.oom import OomKills


@dataclass(frozen=True)
class EngineLimits:
    """What an engine is given besides the model: sizes in bytes, times in seconds."""

    ring_size: int
    credit: str
    stall_timeout: float
    cancel_grace: float
    environ: Mapping[str, str]
    oom_kills: OomKills = field(default_factory=OomKills)


@dataclass(frozen=True)
class ReplicaLimits:
    """Times in seconds. ``load_timeout`` is None where the life keeps it by itself."""

    load_timeout: float | None
    unload_timeout: float


@dataclass(frozen=True)
class ReplicaStatistics:
    """A frozen look at one replica, for ``/admin/replicas``, ``ps``, ``/readyz``, metrics and tests."""

    model: str
    replica: int
    state: str
    reason: str
    progress: float
    pid: int | None
    sequences: int
    slots: int
    tokens: int
    restarts: int
    since: float
    """Seconds in this state."""
    device: str | None = None
