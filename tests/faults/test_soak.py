"""Everything at once for a while: a mixed load with a fault every half second, and all that must be true of it all along."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def soak(tmp_path, *arguments):
    """The report of a run that violates nothing. Half an hour of it is the same command with ``--minutes 30``."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "slimproc", "chaos", "--report", str(report), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(report.read_text())
    assert (found["violations"], found["exit_status"], found["interrupted"]) == ([], 0, False)
    return found


def test_a_soak_with_a_fault_every_half_second_ends_each_request_once_and_leaves_nothing(tmp_path):
    found = soak(tmp_path, "--seed", "27", "--minutes", "0.35", "--fault-every", "0.5", "--clients", "8")
    done = found["faults"]["done"]
    assert {"kill", "stop", "unload", "burst", "reload", "deaf"} <= done.keys(), "seed 27 has them all in that time"
    assert found["requests"]["by_end"]["ok"] > 20
    assert found["requests"]["by_end"]["broken"] >= 1, "the deaf were dropped"
    assert found["after"]["held"] == 0
    assert found["after"]["descriptors"] <= found["before"]["descriptors"]
    assert found["after"]["threads"] <= found["before"]["threads"]
