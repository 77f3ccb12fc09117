"""Results as files: one JSON a scenario with every run in it, and one page with the tables of all that are there."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scenario import Comparison, Options, Scenario

PREFACE = """\
# Results

Written by `python benchmarks/run.py`; do not edit. Medians, with the smallest and the largest value in brackets. Both
sides of a ratio were measured in one session, in turns, each with a fresh server; a ratio above 1 means that slimproc is
better. Absolute numbers hold for the machine named; ratios carry over better, though not to other core counts: server,
engine and load client compete for the cores. The JSON beside this page has every single run;
what was missed, and why, is in [misses.md](misses.md).
"""


def document(
    scenario: Scenario, options: Options, environment: dict[str, Any], found: list[Comparison]
) -> dict[str, Any]:
    return {
        "name": scenario.name,
        "number": scenario.number,
        "title": scenario.title,
        "shows": scenario.shows,
        "not_shown": scenario.not_shown,
        "runs": options.runs,
        "quick": options.quick,
        "environment": environment,
        "comparisons": [_summary(comparison) for comparison in found],
    }


def _summary(comparison: Comparison) -> dict[str, Any]:
    summary = asdict(comparison)
    runs = summary.pop("runs")
    summary["statistics"] = {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for name, values in comparison.values.items()
        if values
    }
    return summary | {"ratio": comparison.ratio, "pairs": comparison.pairs, "met": comparison.met, "runs": runs}


def write(directory: Path, made: dict[str, Any]) -> None:
    """The scenario's JSON, and the page over all JSON in ``directory`` anew."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{made['name']}.json").write_text(json.dumps(_rounded(made), indent=1) + "\n")
    documents = [json.loads(path.read_text()) for path in directory.glob("*.json")]
    documents = [found for found in documents if "number" in found]  # a record of another kind stands by itself
    documents.sort(key=lambda found: int(found["number"][1:]))
    (directory / "README.md").write_text("\n".join([PREFACE, *(part for found in documents for part in _part(found))]))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(found) for key, found in value.items()}
    return [_rounded(found) for found in value] if isinstance(value, list) else value


def _part(found: dict[str, Any]) -> Iterable[str]:
    machine = found["environment"]
    yield f"## {found['number']}: {found['title']}\n"
    yield f"Shows: {found['shows']}\n"
    yield f"Does not show: {found['not_shown']}\n"
    if found["quick"]:
        yield "**A quick run: it shows that the script works, and nothing about speed.**\n"
    yield "| what | slimproc | against | ratio (of each pair) | target | met |"
    yield "|---|---|---|---|---|---|"
    yield from (_row(comparison) for comparison in found["comparisons"])
    notes = [
        f"{comparison['label']}: {comparison['note']}" for comparison in found["comparisons"] if comparison["note"]
    ]
    yield "".join(f"\n- {note}" for note in notes) + ("\n" if notes else "")
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    yield (
        f"{found['runs']} runs, {machine['at']}, commit {machine['commit']}; {machine['cpu']}, {machine['cores']} cores, "
        f"load before {machine['load_average_before']}; {machine['system']}, Python {machine['python']}, {versions}.\n"
    )


def _row(comparison: dict[str, Any]) -> str:
    unit = comparison["unit"]
    sides = list(comparison["values"])
    ours = _spread(comparison["statistics"][sides[0]], unit)
    theirs = [
        f"{name}: {_spread(comparison['statistics'][name], unit)}" for name in sides[1:] if comparison["values"][name]
    ]
    against = "; ".join(theirs) or ("-" if len(sides) == 1 else f"{sides[1]}: not measured")
    ratio = "-"
    if comparison["ratio"] is not None:
        ratio = f"{comparison['ratio']:.3g}x ({', '.join(f'{pair:.3g}' for pair in comparison['pairs'])})"
    target = "-"
    if comparison["target"] is not None:
        target = f"≥ {comparison['target']:g}x" if len(sides) > 1 else f"< {comparison['target']:g} {unit}"
    met = {True: "yes", False: "**no**", None: "-"}[comparison["met"]]
    return f"| {comparison['label']} | {ours} | {against} | {ratio} | {target} | {met} |"


def _spread(seen: dict[str, float], unit: str) -> str:
    return f"{_number(seen['median'])} ({_number(seen['min'])} to {_number(seen['max'])}) {unit}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def show(made: dict[str, Any]) -> None:
    """The table, on the terminal."""
    print(f"\n{made['number']} {made['name']}: {made['title']}")
    for comparison in made["comparisons"]:
        cells = _row(_rounded(comparison)).strip("| ").split(" | ")
        print("  " + "\n      ".join([cells[0], f"slimproc {cells[1]}", f"against {cells[2]}", f"ratio {cells[3]}"]))
        print(f"      target {cells[4]}, met: {cells[5].strip('*')}")
        if comparison["note"]:
            print(f"      {comparison['note']}")
