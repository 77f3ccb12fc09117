"""``slimproc chaos`` from the outside: its statuses, its report, and a short run against a live server."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml

from slimproc.chaos.builtin import builtin
from slimproc.config import load_config


def chaos(*arguments, limit=100):
    return subprocess.run(
        [sys.executable, "-m", "slimproc", "chaos", *arguments],
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seed", "x"], "--seed: a whole number from 0"),
        (["--minutes", "0"], "--minutes: a number from"),
        (["--minutes", "nan"], "--minutes: a number from"),
        (["--clients", "0"], "--clients: a whole number from 1"),
        (["--fault-every", "-1"], "--fault-every: a number from"),
        (["--report", "/nowhere/at/all"], "--report: /nowhere/at/all: No such file"),
        (["--config", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_what_makes_no_sense_is_2_and_named(arguments, said):
    ended = chaos(*arguments)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_builtin_configuration_is_one(tmp_path):
    file = tmp_path / "slimproc.yaml"
    file.write_text(yaml.safe_dump(builtin()))
    config = load_config(file, flags={}, environ={}, dotenv=None)
    wanted = sum(model.replicas * model.fake.bytes for model in config.models.values())
    assert wanted > builtin()["memory"]["host_limit"], "they do not fit together"


@pytest.mark.slow
def test_a_short_run_against_a_live_server_violates_nothing(tmp_path):
    report = tmp_path / "report.json"
    ended = chaos("--seed", "5", "--minutes", "0.1", "--fault-every", "1", "--clients", "8", "--report", str(report))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(report.read_text())
    assert found["violations"] == []
    assert found["exit_status"] == 0
    assert found["requests"]["by_end"]["ok"] > 0
    assert sum(found["faults"]["done"].values()) > 0
    assert found["after"]["held"] == 0
