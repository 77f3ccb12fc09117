"""Pictures of results: one a scenario whose comparisons have a place, and one with all ratios beside their targets.

They are drawn from the JSON alone. matplotlib is wanted for nothing else; without it pictures stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator
except ImportError:
    Figure = None

MISSING = (
    "matplotlib is not installed, so no pictures are drawn, and those that are there stay as they were, whatever is "
    "measured now. To get them: pip install matplotlib, and then "
    "python benchmarks/report.py draws them from the results that are there"
)
RATIOS = "ratios.png"
_COLORS = ("#0b6e99", "#d1603d", "#6b8f3c", "#7b5ea7", "#8a8a8a")
"""slimproc first; each of them can be told from the others in grey, too."""
_MARKERS = "osD^v"
_MET, _MISSED, _UNSURE = "#2e7d4f", "#b3261e", "#8a6d1a"
_COLUMNS = 3
_LOG_FROM = 16.0
"""An axis whose largest value is so many times its smallest is logarithmic."""
_TICKS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50)


def available() -> bool:
    return Figure is not None


def draw(directory: Path, found: dict[str, Any]) -> bool:
    """A document's picture as NAME.png. False: none was drawn. A picture from before is gone where there is nothing to draw
    any more, and stays where there is nothing to draw it with.
    """
    if not available():
        return False
    path = directory / f"{found['name']}.png"
    panels: dict[str, list[dict[str, Any]]] = {}
    for comparison in found["comparisons"]:
        if comparison.get("place"):
            panels.setdefault(comparison["place"]["panel"], []).append(comparison)
    if not panels:
        path.unlink(missing_ok=True)
        return False
    columns = 2 if len(panels) == 4 else min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(0.6 + 4.2 * columns, 0.9 + 3.5 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, (title, comparisons) in zip(axes, panels.items(), strict=False):
        _panel(axis, title, comparisons)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(f"{found['number']} {found['name']}".strip() + (" (a quick run)" if found["quick"] else ""))
    figure.savefig(path, dpi=110)
    return True


def _panel(axis: Axes, title: str, comparisons: list[dict[str, Any]]) -> None:
    """Medians as lines, and the range of all runs as bars."""
    comparisons = sorted(comparisons, key=lambda one: one["place"]["x"])
    sides = list(dict.fromkeys(side for one in comparisons for side, values in one["values"].items() if values))
    for number, side in enumerate(sides):
        there = [one for one in comparisons if one["values"].get(side)]
        seen = [one["statistics"][side] for one in there]
        x, y = [one["place"]["x"] for one in there], [one["median"] for one in seen]
        bars = [[one["median"] - one["min"] for one in seen], [one["max"] - one["median"] for one in seen]]
        color = _COLORS[-1] if side == "ideal" else _COLORS[number % len(_COLORS)]
        name = side.removeprefix("slimproc, ")
        style = {
            "color": color,
            "marker": _MARKERS[number % len(_MARKERS)],
            "markersize": 4,
            "capsize": 3,
            "linewidth": 1.4,
        }
        axis.errorbar(x, y, bars, label=name, linestyle="--" if side == "ideal" else "-", **style)
    targets = {one["target"] for one in comparisons if len(one["values"]) == 1} - {None}
    for target in targets:
        axis.axhline(target, color=_COLORS[-1], linestyle=":", label=f"limit {target:g}")
    where, first = [one["place"]["x"] for one in comparisons], comparisons[0]
    _scale(axis, where, [value for one in comparisons for values in one["values"].values() for value in values])
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(first["place"]["x_name"], fontsize=9)
    axis.set_ylabel(first["place"]["y_name"] or first["unit"], fontsize=9)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)
    columns = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncol": 3}
    axis.legend(fontsize=8, frameon=False, columnspacing=1.0, **columns)


def _scale(axis: Axes, where: list[float], values: list[float]) -> None:
    plain = FuncFormatter(lambda value, _: f"{value:,.6g}")
    if max(where) >= _LOG_FROM * min(where):
        axis.set_xscale("log", base=2)
        axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xticks(where)
    axis.xaxis.set_major_formatter(plain)
    if min(values) > 0 and max(values) >= _LOG_FROM * min(values):
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=min(0.0, *values))
    axis.yaxis.set_major_formatter(plain)


def draw_ratios(directory: Path, documents: Iterable[dict[str, Any]]) -> bool:
    """All ratios that have a target, each with that of every pair. False: none was drawn; see ``draw``."""
    if not available():
        return False
    path = directory / RATIOS
    rows = [
        (f"{found['number']} {comparison['label']}".strip(), comparison)
        for found in documents
        for comparison in found["comparisons"]
        if comparison["ratio"] is not None and comparison["target"] is not None
    ]
    if not rows:
        path.unlink(missing_ok=True)
        return False
    figure = Figure(figsize=(10, 1.3 + 0.25 * len(rows)), layout="constrained")
    axis = figure.subplots()
    for place, (_, comparison) in enumerate(rows):
        target, pairs = comparison["target"], comparison["pairs"]
        low, high = min(pairs) / target, max(pairs) / target
        color = (_MET if comparison["met"] else _MISSED) if low >= 1 or high < 1 else _UNSURE
        axis.plot([low, high], [place, place], color=color, linewidth=2.5, alpha=0.45)
        axis.plot(comparison["ratio"] / target, place, "o", color=color, markersize=5)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    axis.set_xlim(min(low, 0.5), max(high, 2.0))
    axis.set_xticks([tick for tick in _TICKS if axis.get_xlim()[0] <= tick <= axis.get_xlim()[1]])
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.tick_params(labelsize=8)
    axis.set_yticks(range(len(rows)), [_short(label) for label, _ in rows], fontsize=7)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    words = [f"{comparison['ratio']:.3g}x of {comparison['target']:g}x" for _, comparison in rows]
    right = axis.secondary_yaxis("right")
    right.set_yticks(range(len(rows)), words, fontsize=7)
    axis.set_xlabel(
        "the ratio, in targets: from 1 on it is met (green), below it is missed (red); brown: the pairs of runs disagree",
        fontsize=8,
    )
    axis.grid(alpha=0.25, axis="x")
    figure.savefig(path, dpi=110)
    return True


def _short(label: str) -> str:
    return label if len(label) <= 72 else label[:71] + "…"
