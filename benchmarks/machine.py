"""What a result was measured on: processor, cores, load before, versions, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

PACKAGES = ("slimproc", "uvloop", "aiohttp", "msgspec", "llama-cpp-python")
ROOT = Path(__file__).resolve().parent.parent


def environment() -> dict[str, Any]:
    """Call it before the measurement: the load average is the machine's own then."""
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_average_before": [round(load, 2) for load in os.getloadavg()],
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "commit": _commit(),
    }


def _cpu_model() -> str:
    if platform.system() == "Linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """With ``+changes`` when what is measured, or what measures it, is not what was committed."""
    head = _git("rev-parse", "--short=12", "HEAD")
    changes = _git("status", "--porcelain", "--", "slimproc", "benchmarks/*.py")
    return (head or "unknown") + ("+changes" if changes else "")


def _git(*arguments: str) -> str:
    try:
        ran = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return ran.stdout.strip()
