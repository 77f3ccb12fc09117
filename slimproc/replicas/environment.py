"""The environment that engines and other children are spawned with, where it differs from the front's own."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

from slimproc.settings import BACKENDS

_NOT_FOR_ENGINES = ("NOTIFY_SOCKET", "WATCHDOG_", "LISTEN_", "CREDENTIALS_DIRECTORY")
HOST = "host"
"""The device that is the machine's own memory."""
_OPENBLAS = Path(f"/usr/lib/{platform.machine()}-linux-gnu/openblas-pthread/libopenblas.so.0")
"""Debian's and Ubuntu's package libopenblas0-pthread."""


def child_environment(environ: Mapping[str, str], device: str | None) -> dict[str, str]:
    """What any child of ours may know: not the service manager's channels, and of all GPUs the one that it was given.

    ``device``: a GPU's or MIG instance's UUID; ``host``: it may use no GPU; None: whichever ``environ`` lets it see.
    """
    kept = {key: value for key, value in environ.items() if not key.startswith(_NOT_FOR_ENGINES)}
    if device is not None:
        kept["CUDA_VISIBLE_DEVICES"] = "" if device == HOST else device
        kept["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # so that what a child prints of numbers is what NVML says
    return kept


def engine_environment(
    environ: Mapping[str, str], backend: str, device: str | None = None, *, openblas: Path = _OPENBLAS
) -> dict[str, str]:
    """What an engine may know: as any child of ours, and our package wherever it is imported from.

    What can only be said before a process starts is said here by the traits of the ``backend``; the rest is the engine's
    own business. A name that is no backend's is another child of ours, which needs our package as well.
    """
    kept = child_environment(environ, device)
    package = str(Path(__file__).resolve().parents[2])
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (package, kept.get("PYTHONPATH", ""))))
    kept["GGML_NO_BACKTRACE"] = "1"  # on abort ggml would start a debugger, and print to stdout
    traits = BACKENDS.get(backend)
    if traits is None:
        return kept
    for key, value in traits.environment:
        kept.setdefault(key, value)
    if traits.slow_blas and sys.platform == "linux" and openblas.exists():
        kept["LD_PRELOAD"] = ":".join(filter(None, (kept.get("LD_PRELOAD", ""), str(openblas))))
    return kept
