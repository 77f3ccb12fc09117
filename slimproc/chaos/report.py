"""A run as a JSON document and as a few lines for people."""

from __future__ import annotations

import platform
from collections import Counter
from dataclasses import asdict
from typing import Any

from slimproc import __version__
from slimproc.chaos.run import Run, environment


def report_of(run: Run) -> dict[str, Any]:
    """Raw counts, the seed, and every violation. Seconds and bytes."""
    plan = run.plan
    return {
        "seed": plan.seed,
        "duration": plan.duration,
        "clients": plan.clients,
        "fault_every": plan.fault_every,
        "models": [asdict(target) for target in plan.targets],
        "version": __version__,
        "python": platform.python_version(),
        "environment": environment(),
        "elapsed": round(run.elapsed, 1),
        "interrupted": run.stopping,
        "requests": {
            "sent": len(run.told),
            "by_kind": dict(sorted(run.asked.items())),
            "by_end": dict(sorted(ends(run).items())),
        },
        "faults": {"done": dict(sorted(run.breaker.done.items())), "missed": dict(sorted(run.breaker.missed.items()))},
        "events": run.breaker.events,
        "health": {"asked": run.healths, "slowest": round(run.slowest_health, 3)},
        "before": _sight(run, "before"),
        "after": _sight(run, "after"),
        "resident": [[round(at, 1), size] for at, size in run.resident[:: max(1, len(run.resident) // 100)]],
        "exit_status": run.exit_status,
        "violations": [asdict(one) for one in run.violations],
    }


def ends(run: Run) -> Counter[str]:
    """Requests by how they ended for their client."""
    return Counter(f"{one.end} {one.code}".strip() for one in run.told)


def _sight(run: Run, name: str) -> dict[str, Any] | None:
    sight = getattr(run, name)
    if sight is None:
        return None
    return {
        "descriptors": sight.descriptors,
        "threads": sight.threads,
        "resident": sight.resident,
        "children": sorted(sight.children.values()),
        "held": sight.sum("memory_bytes", kind="held"),
    }
