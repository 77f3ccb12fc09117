"""The benchmark scripts run and write what they promise. Nothing here looks at a speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 60


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=LIMIT, check=False)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one quick run of everything leaves behind."""
    directory = tmp_path_factory.mktemp("results")
    ran = run("benchmarks/run.py", "--quick", "--slim-serve", "none", "--results", str(directory))
    assert ran.returncode == 0, ran.stderr
    return directory


def document(results: Path, name: str) -> dict[str, Any]:
    found = json.loads((results / f"{name}.json").read_text())
    assert found["name"] == name
    assert found["quick"] is True
    return found


def test_list_names_every_target_and_measures_nothing() -> None:
    ran = run("benchmarks/run.py", "--list", "--results", "/nowhere/at/all")
    assert ran.returncode == 0, ran.stderr
    assert [line.split()[0] for line in ran.stdout.splitlines()] == ["S1", "S2", "S3", "S4", "S12"]


def test_an_unknown_name_is_refused() -> None:
    ran = run("benchmarks/run.py", "nonsense")
    assert ran.returncode == 1
    assert "nonsense" in ran.stderr


def test_a_missing_peer_at_a_given_path_is_refused_and_not_left_out(tmp_path: Path) -> None:
    ran = run("benchmarks/serving.py", "S2", "--quick", "--slim-serve", str(tmp_path / "x"), "--results", str(tmp_path))
    assert ran.returncode == 1
    assert str(tmp_path / "x") in ran.stderr


@pytest.mark.parametrize("name", ["ring", "slim-serve", "joined-writes", "token-writes", "recovery"])
def test_every_scenario_says_where_and_how_it_was_measured(results: Path, name: str) -> None:
    found = document(results, name)
    assert {"number", "title", "shows", "not_shown", "runs", "comparisons"} <= set(found)
    machine = found["environment"]
    assert {"cpu", "cores", "load_average_before", "system", "python", "packages", "commit", "at"} <= set(machine)
    assert {"uvloop", "aiohttp"} <= set(machine["packages"])
    for comparison in found["comparisons"]:
        assert len(comparison["values"]["slimproc"]) >= 1
        assert set(comparison["statistics"]["slimproc"]) == {"median", "min", "max"}


@pytest.mark.parametrize("name", ["ring", "joined-writes", "token-writes"])
def test_a_ratio_is_that_of_the_medians_of_its_two_sides(results: Path, name: str) -> None:
    for comparison in document(results, name)["comparisons"]:
        ours, theirs = (comparison["statistics"][side]["median"] for side in comparison["values"])
        expected = theirs / ours if comparison["lower_is_better"] else ours / theirs
        assert comparison["ratio"] == pytest.approx(expected, rel=1e-3)
        assert comparison["met"] in ((None,) if comparison["target"] is None else (True, False))


@pytest.mark.parametrize("name", ["slim-serve", "joined-writes", "token-writes"])
def test_each_run_has_the_cpu_time_of_every_process_and_the_clients_own(results: Path, name: str) -> None:
    processes = {"slim-serve": {"front", "engine", "client"}, "joined-writes": {"front", "engine", "client"}}
    for comparison in document(results, name)["comparisons"]:
        for seen in comparison["runs"]:
            ours = processes.get(name) if seen["side"] == "slimproc" else None
            assert set(seen["cpu_us_per_token"]) == (ours or {"server", "client"})
            assert seen["tokens"] == seen["requests"] * (seen["events"] // seen["requests"] - 2)
            assert {"wall_s", "client_cpu_share", "bytes_per_token", "writes_per_token"} <= set(seen)


@pytest.mark.parametrize("name", ["joined-writes", "token-writes"])
def test_the_floor_writes_as_many_bytes_as_slimproc(results: Path, name: str) -> None:
    for comparison in document(results, name)["comparisons"]:
        ours, floor = (seen["bytes_per_token"] for seen in comparison["runs"])
        assert floor == pytest.approx(ours, rel=0.01 if name == "token-writes" else 0.05)  # chunk sizes differ


def test_without_the_peer_its_side_is_empty_and_the_result_says_how_to_get_it(results: Path) -> None:
    (comparison,) = document(results, "slim-serve")["comparisons"]
    assert comparison["values"]["slim-serve"] == []
    assert comparison["ratio"] is None
    assert comparison["met"] is None
    assert "pip install slim-serve" in comparison["note"]


def test_a_death_has_the_time_to_the_error_event_and_to_ready_beyond_the_load(results: Path) -> None:
    to_error, to_ready = document(results, "recovery")["comparisons"]
    assert (to_error["target"], to_ready["target"]) == (50, 300)
    for death in to_error["runs"]:
        assert death["error_ms"] == max(death["errors_ms"])
        assert death["error_ms"] > 0
        assert death["ready_ms"] == pytest.approx(death["beyond_load_ms"] + death["load_ms"], abs=0.1)


def test_the_page_has_a_section_for_every_scenario_and_marks_quick_runs(results: Path) -> None:
    page = (results / "README.md").read_text()
    assert [line.split(":")[0] for line in page.splitlines() if line.startswith("## ")] == [
        "## S1", "## S2", "## S3", "## S4", "## S12",
    ]  # fmt: skip
    assert page.count("quick run") == 5
