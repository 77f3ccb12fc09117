"""Results as files: one JSON a scenario with every run in it, and one page with the tables of all that are there.

    python benchmarks/report.py [DIRECTORY]

makes the page and the pictures anew from the JSON that is there, and measures nothing.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import plots
from scenario import HERE, Comparison, Options, Scenario

PREFACE = """\
# Results

Written by `python benchmarks/run.py`; do not edit. Medians, with the smallest and the largest value in brackets. Both
sides of a ratio were measured in one session, in turns, each with a fresh server; a ratio above 1 means that slimproc is
better. Absolute numbers hold for the machine named; ratios carry over better, though not to other core counts: server,
engine and load client compete for the cores. A target counts as met or missed by the ratio of the medians; where the
pairs of runs do not agree about it, the page says "within the spread", and where there was only one, "one run", which
shows no spread. The JSON beside this page has every single run; what was missed, and why, is in [misses.md](misses.md).
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
    """The scenario's JSON and picture, and the page over all JSON in ``directory`` anew."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{made['name']}.json").write_text(json.dumps(_rounded(made), indent=1) + "\n")
    plots.draw(directory, _rounded(made))
    documents = load(directory)
    plots.draw_ratios(directory, documents)
    (directory / "README.md").write_text(page(directory, documents))


def load(directory: Path) -> list[dict[str, Any]]:
    """All scenarios' results: those with a target's number in its order, then the others by name."""
    found = [json.loads(path.read_text()) for path in directory.glob("*.json")]
    found = [one for one in found if "number" in one]  # a record of another kind stands by itself
    return sorted(found, key=lambda one: (float(one["number"][1:] or math.inf), one["name"]))


def page(directory: Path, documents: list[dict[str, Any]]) -> str:
    """Markdown. It shows the pictures that are there."""
    parts = [*_ratios(directory, documents), *_limits(documents)]
    return "\n".join([PREFACE, *parts, *(part for found in documents for part in _part(directory, found))])


def again(directory: Path) -> None:
    """The page and all pictures, from the JSON that is there. SystemExit: there is no such directory."""
    if not directory.is_dir():
        raise SystemExit(f"there is no directory {directory}")
    documents = load(directory)
    for found in documents:
        plots.draw(directory, found)
    plots.draw_ratios(directory, documents)
    (directory / "README.md").write_text(page(directory, documents))


def _ratios(directory: Path, documents: list[dict[str, Any]]) -> Iterable[str]:
    rows = [
        f"| {_key(found)} | {one['label']} | {' against '.join(_names(one))} | {one['ratio']:.3g}x "
        f"| {min(one['pairs']):.3g} to {max(one['pairs']):.3g} | {_target(one)} | {_met(one)} |"
        for found in documents
        for one in found["comparisons"]
        if one["ratio"] is not None
    ]
    if not rows:
        return
    yield "## Beside its peers\n"
    yield "Every ratio of this page: of the medians, and the smallest and the largest of a pair of neighbouring runs.\n"
    if (directory / plots.RATIOS).exists():
        yield f"![All ratios that have a target]({plots.RATIOS})\n"
    yield "| scenario | what | | ratio | spread | target | met |"
    yield "|---|---|---|---|---|---|---|"
    yield from rows
    yield ""


def _limits(documents: list[dict[str, Any]]) -> Iterable[str]:
    """What is held against a number and not against a neighbour."""
    rows = []
    for found in documents:
        for one in found["comparisons"]:
            if len(one["values"]) == 1 and one["target"] is not None:
                seen = one["statistics"][next(iter(one["values"]))]
                spread = f"{_number(seen['min'])} to {_number(seen['max'])}"
                median = f"{_number(seen['median'])} {one['unit']}"
                rows.append(f"| {_key(found)} | {one['label']} | {median} | {spread} | {_target(one)} | {_met(one)} |")
    if not rows:
        return
    yield "## Against a limit\n"
    yield "The worst of all values is held against the limit.\n"
    yield "| scenario | what | median | spread | limit | met |"
    yield "|---|---|---|---|---|---|"
    yield from rows
    yield ""


def _key(found: dict[str, Any]) -> str:
    """What a scenario is called: its target's number, or its name."""
    key: str = found["number"] or found["name"]
    return key


def _names(comparison: dict[str, Any]) -> list[str]:
    """Of the two sides of a ratio."""
    return [side.removeprefix("slimproc, ") for side in comparison["values"]][:2]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(found) for key, found in value.items()}
    return [_rounded(found) for found in value] if isinstance(value, list) else value


def _part(directory: Path, found: dict[str, Any]) -> Iterable[str]:
    machine = found["environment"]
    yield f"## {_key(found)}: {found['title']}\n"
    yield f"Shows: {found['shows']}\n"
    yield f"Does not show: {found['not_shown']}\n"
    if found["quick"]:
        yield "**A quick run: it shows that the script works, and nothing about speed.**\n"
    if (directory / f"{found['name']}.png").exists():
        yield f"![{found['name']}: medians, with the range of all runs]({found['name']}.png)\n"
    yield "| what | slimproc | against | ratio (of each pair) | target | met |"
    yield "|---|---|---|---|---|---|"
    yield from (_row(comparison) for comparison in found["comparisons"])
    notes = [
        f"{comparison['label']}: {comparison['note']}" for comparison in found["comparisons"] if comparison["note"]
    ]
    yield "".join(f"\n- {note}" for note in notes) + ("\n" if notes else "")
    if memory := _memory(found):
        yield f"Resident memory at most, of any run: {memory}.\n"
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    yield (
        f"{found['runs']} runs, {machine['at']}, commit {machine['commit']}; {machine['cpu']}, {machine['cores']} cores, "
        f"load before {machine['load_average_before']}; {machine['system']}, Python {machine['python']}, {versions}.\n"
    )


def _memory(found: dict[str, Any]) -> str:
    """By side and process, where the runs have it. Pages that processes share count for each of them."""
    most: dict[str, dict[str, float]] = {}
    for comparison in found["comparisons"]:
        for run in comparison["runs"]:
            side = most.setdefault(run.get("side", "slimproc"), {})
            for name, sizes in run.get("memory_mib", {}).items():
                side[name] = max(side.get(name, 0.0), sizes.get("peak", 0.0))
    sides = {
        side: ", ".join(f"{name} {_number(size)} MiB" for name, size in sizes.items()) for side, sizes in most.items()
    }
    return "; ".join(f"{side}: {sizes}" for side, sizes in sides.items() if sizes)


def _row(comparison: dict[str, Any]) -> str:
    unit = comparison["unit"]
    sides = list(comparison["values"])
    ours = _spread(comparison["statistics"][sides[0]], unit)
    if sides[0] != "slimproc":
        ours = f"{_names(comparison)[0]}: {ours}"
    theirs = [
        f"{name}: {_spread(comparison['statistics'][name], unit)}" for name in sides[1:] if comparison["values"][name]
    ]
    against = "; ".join(theirs) or ("-" if len(sides) == 1 else f"{sides[1]}: not measured")
    ratio = "-"
    if comparison["ratio"] is not None:
        ratio = f"{comparison['ratio']:.3g}x ({', '.join(f'{pair:.3g}' for pair in comparison['pairs'])})"
    return f"| {comparison['label']} | {ours} | {against} | {ratio} | {_target(comparison)} | {_met(comparison)} |"


def _target(comparison: dict[str, Any]) -> str:
    if comparison["target"] is None:
        return "-"
    if len(comparison["values"]) > 1:
        return f"≥ {comparison['target']:g}x"
    return f"{'<' if comparison['lower_is_better'] else '>'} {comparison['target']:g} {comparison['unit']}"


def _met(comparison: dict[str, Any]) -> str:
    word = {True: "yes", False: "**no**", None: "-"}[comparison["met"]]
    if comparison["met"] is None:
        return word
    if len(comparison["pairs"] or next(iter(comparison["values"].values()))) == 1:
        return f"{word} (one run)"
    agreed = {pair >= comparison["target"] for pair in comparison["pairs"]}
    return word if len(agreed) <= 1 else f"{word}, within the spread"


def _spread(seen: dict[str, float], unit: str) -> str:
    return f"{_number(seen['median'])} ({_number(seen['min'])} to {_number(seen['max'])}) {unit}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def show(made: dict[str, Any]) -> None:
    """The table, on the terminal."""
    print(f"\n{made['number']} {made['name']}: {made['title']}".replace("\n ", "\n"))
    for comparison in made["comparisons"]:
        cells = _row(_rounded(comparison)).strip("| ").split(" | ")
        print("  " + "\n      ".join([cells[0], f"slimproc {cells[1]}", f"against {cells[2]}", f"ratio {cells[3]}"]))
        print(f"      target {cells[4]}, met: {cells[5].replace('*', '')}")
        if comparison["note"]:
            print(f"      {comparison['note']}")


if __name__ == "__main__":
    if not plots.available():
        print(plots.MISSING, file=sys.stderr)
    again(Path(sys.argv[1]) if sys.argv[1:] else HERE / "results")
