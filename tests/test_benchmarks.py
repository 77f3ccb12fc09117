"""The benchmark scripts run and write what they promise. Nothing here looks at a speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.models import tiny_random

pytestmark = pytest.mark.slow  # each test waits for whole servers, and there are many

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 60


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=LIMIT, check=False)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one quick run of everything leaves behind."""
    directory = tmp_path_factory.mktemp("results")
    model = tiny_random(directory / "tiny.gguf")
    peers = ("--slim-serve", "none", "--llama-server", "none", "--llama-batched-bench", "none")
    ran = run("benchmarks/run.py", "--quick", "--model", str(model), *peers, "--results", str(directory))
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
    assert [line.split()[0] for line in ran.stdout.splitlines()] == [f"S{n}" for n in (*range(1, 10), *range(11, 17))]


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


MODEL_SCENARIOS = {
    "llama-server": ("llama-server", ["2 streams of unequal lengths, 1 thread"]),
    "batched-bench": ("llama-batched-bench", ["1 sequence, 1 thread", "2 sequences, 1 thread"]),
    "known-prompt": ("llama-server", ["seen before", "never seen"]),
    "start": ("llama-server", ["exec to the first token, 1 thread"]),
}


@pytest.mark.parametrize("name", MODEL_SCENARIOS)
def test_a_real_model_is_measured_without_the_peer_and_the_result_says_how_to_get_that(
    results: Path, name: str
) -> None:
    peer, labels = MODEL_SCENARIOS[name]
    comparisons = document(results, name)["comparisons"]
    assert len(comparisons) == len(labels)
    for comparison, label in zip(comparisons, labels, strict=True):
        assert comparison["label"].startswith(label)
        assert min(comparison["values"]["slimproc"]) > 0
        assert comparison["values"][peer] == []
        assert comparison["ratio"] is None
        assert comparison["met"] is None
    assert f"{peer} is not installed" in comparisons[0]["note"]
    assert "benchmarks/README.md" in comparisons[0]["note"]


def test_a_models_rate_counts_the_tokens_that_were_asked_for(results: Path) -> None:
    (comparison,) = document(results, "llama-server")["comparisons"]
    (seen,) = comparison["runs"]
    assert seen["tokens_per_s"] == pytest.approx(seen["tokens"] / seen["wall_s"], rel=1e-3)
    assert len(seen["first_token_s"]) == 4
    assert 4 * 4 <= seen["tokens"] <= 4 * 8
    assert set(seen["cpu_ms_per_token"]) == {"front", "engine"}


def test_the_engine_alone_says_where_its_steps_went(results: Path) -> None:
    for comparison in document(results, "batched-bench")["comparisons"]:
        (seen,) = comparison["runs"]
        assert [row["sequences"] for row in seen["rows"]] == [1, 2]
        for row in seen["rows"]:
            assert set(row["parts"]) == {"fill", "decode", "sample"}
            assert 0 < sum(row["parts"].values()) < 1


def test_a_prompt_is_taken_from_cache_when_it_comes_again_and_only_then(results: Path) -> None:
    known, unseen = document(results, "known-prompt")["comparisons"]
    assert known["lower_is_better"]
    (seen,) = known["runs"]
    for tokens, (first, *again) in zip(seen["prompt_tokens"], seen["cached_tokens"], strict=True):
        assert first < tokens / 2
        assert again == [tokens - 1] * len(again)
    assert unseen["target"] is None


def test_two_replicas_and_one_are_asked_the_same(results: Path) -> None:
    (comparison,) = document(results, "prefix-affinity")["comparisons"]
    two, one = comparison["runs"]
    assert (two["side"], one["side"]) == ("slimproc", "one replica")
    assert two["prompt_tokens"] == one["prompt_tokens"]
    assert (len(two["replicas"]), len(one["replicas"])) == (2, 1)
    for seen in (two, one):
        assert seen["cached_percent"] == pytest.approx(seen["cached_tokens"] / seen["prompt_tokens"] * 100, rel=1e-3)
        assert 0 < seen["cached_percent"] < 100


def test_answers_beside_a_prompt_are_held_against_themselves_without_it(results: Path) -> None:
    slowed, first = document(results, "prefill")["comparisons"]
    (seen,) = slowed["runs"]
    assert (slowed["target"], first["target"]) == (3.0, None)
    assert slowed["values"]["slimproc"] == [pytest.approx(seen["beside_p99_ms"] / seen["quiet_p99_ms"], rel=1e-3)]
    assert min(seen["distances"]) >= 7
    assert first["values"]["slimproc"][0] > 0


@pytest.mark.parametrize("program", ["llama-server", "llama-batched-bench"])
def test_a_program_of_llama_cpp_that_is_not_at_its_given_path_is_refused(tmp_path: Path, program: str) -> None:
    path = str(tmp_path / "x")
    ran = run("benchmarks/engines.py", "S5", "S6", "--quick", f"--{program}", path, "--results", str(tmp_path))
    assert ran.returncode == 1
    assert path in ran.stderr


def test_a_model_that_is_not_there_fails_its_scenarios_and_leaves_no_result(tmp_path: Path) -> None:
    arguments = ("S7", "--quick", "--model", str(tmp_path / "x"), "--llama-server", "none")
    ran = run("benchmarks/prefix.py", *arguments, "--results", str(tmp_path))
    assert ran.returncode == 1
    assert "failed: known-prompt" in ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_page_has_a_section_for_every_scenario_and_marks_quick_runs(results: Path) -> None:
    page = (results / "README.md").read_text()
    assert [line.split(":")[0] for line in page.splitlines() if line.startswith("## ")] == [
        f"## S{n}" for n in (*range(1, 10), *range(11, 17))
    ]
    assert page.count("quick run") == 15
