"""Prometheus's own programs, for tests that ask them; without them those tests are skipped and say how to get them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
_HOW = "apt-get install --no-install-recommends prometheus"

needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason=f"NOT CHECKED: metrics, alerts and queries, as there is no promtool here; {_HOW}"
)
needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None, reason=f"NOT CHECKED: a scrape by a real Prometheus, as there is none here; {_HOW}"
)


def promtool(*arguments: str, given: bytes = b"", cwd: Path | None = None) -> tuple[int, str]:
    """Its status and all that it says."""
    assert PROMTOOL is not None
    command = [PROMTOOL, *arguments]
    ran = subprocess.run(command, input=given, capture_output=True, cwd=cwd, timeout=60, check=False)
    return ran.returncode, (ran.stdout + ran.stderr).decode()
