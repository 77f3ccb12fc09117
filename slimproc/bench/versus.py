"""Versus: two servers under one plan, in rounds that change direction, and their ratios with the spread over the rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec

from slimproc.bench.summary import Summary

_Value = Callable[[Summary], float | None]
LOWER = "lower"
HIGHER = "higher"
MEASURES: tuple[tuple[str, str, _Value], ...] = (
    ("tokens/s", HIGHER, lambda summary: summary.tokens_per_s),
    ("requests/s", HIGHER, lambda summary: summary.requests_per_s),
    ("good requests/s", HIGHER, lambda summary: summary.goodput),
    ("time to first token p50", LOWER, lambda summary: summary.ttft.p50),
    ("time to first token p99", LOWER, lambda summary: summary.ttft.p99),
    ("between tokens, mean", LOWER, lambda summary: summary.itl.mean),
    ("between tokens p99", LOWER, lambda summary: summary.itl.p99),
    ("latency p50", LOWER, lambda summary: summary.latency.p50),
    ("latency p99", LOWER, lambda summary: summary.latency.p99),
)


class Comparison(msgspec.Struct, frozen=True):
    """One measure of two servers. ``ratios`` are by round, above 1 where the first server is the better one."""

    measure: str
    better: str
    first: list[float]
    second: list[float]
    ratios: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def clear(self) -> bool:
        """Every round says the same: one server is the better one in all of them."""
        return min(self.ratios) > 1 or max(self.ratios) < 1


def compare(rounds: Sequence[tuple[Summary, Summary]]) -> list[Comparison]:
    """What both servers have in every round; a measure without a value, or of nothing, is left out."""
    found: list[Comparison] = []
    for measure, better, value in MEASURES:
        pairs = [(value(first), value(second)) for first, second in rounds]
        sides = [(first, second) for first, second in pairs if first and second]
        if not sides or len(sides) < len(pairs):
            continue
        ratios = [first / second if better == HIGHER else second / first for first, second in sides]
        found.append(Comparison(measure, better, [a for a, _ in sides], [b for _, b in sides], ratios))
    return found


def order(number: int) -> tuple[int, int]:
    """Which of the two goes first in round ``number``: they take turns, so that a drift of the machine meets both."""
    return (0, 1) if number % 2 == 0 else (1, 0)
