"""The tables of ``slimproc bench``."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from slimproc.bench.benchmark import Benchmark
from slimproc.bench.summary import Spread, Summary
from slimproc.bench.versus import HIGHER, Comparison, compare
from slimproc.cli.output import print_table

_TIMES = ("ms", "mean", "p50", "p90", "p99", "max", "of")


def show(benchmark: Benchmark) -> None:
    for place, side in enumerate(benchmark.sides):
        summary = benchmark.whole(place)
        if summary is not None:
            model = f", model {side.model}" if side.model is not None else ""
            _show_one(summary, f"{side.target.url}{model}")
    comparisons = compare(benchmark.pairs())
    if comparisons:
        _show_ratios(comparisons, benchmark)


def _show_one(summary: Summary, title: str) -> None:
    print_table(("", title), _counts(summary))
    print_table(_TIMES, _times(summary))
    for kind, example in summary.examples.items():
        print(f"{summary.kinds[kind]} of kind {kind}" + (f": {example}" if example else ""))
    if summary.examples:
        print()


def _counts(summary: Summary) -> Iterator[tuple[str, str]]:
    parts = {"ok": summary.ok, "refused": summary.refused, "left": summary.cancelled, "failed": summary.errors}
    said = ", ".join(f"{count} {name}" for name, count in parts.items() if count or name == "ok")
    yield "requests", f"{summary.requests} in {summary.wall:.2f} s: {said}"
    yield "requests/s", f"{summary.requests_per_s:.2f}"
    if summary.goodput is not None:
        yield "good requests/s", f"{summary.goodput:.2f} ({summary.good} kept every limit)"
    counted = {"events": ", counted by events", "both": ", some counted by events"}.get(summary.tokens_by, "")
    yield "tokens/s", f"{summary.tokens_per_s:.1f} ({summary.tokens} tokens{counted})"
    if summary.prompt_tokens:
        yield "prompt tokens", f"{summary.prompt_tokens}, {summary.cached_tokens} of them from cache"
    share = summary.client_cpu / summary.wall if summary.wall else 0.0
    each = "" if summary.client_cpu_us_per_token is None else f", {summary.client_cpu_us_per_token:.2f} µs a token"
    yield "the client's CPU", f"{share:.0%} of one core{each}"


def _times(summary: Summary) -> Iterator[tuple[str, ...]]:
    for name, spread in (
        ("time to first token", summary.ttft),
        ("between tokens", summary.itl),
        ("latency", summary.latency),
        ("refused after", summary.refusal),
        ("sent late by", summary.late),
    ):
        if spread.count:
            yield (name, *_milliseconds(spread), str(spread.count))


def _milliseconds(spread: Spread) -> Iterator[str]:
    for seconds in (spread.mean, spread.p50, spread.p90, spread.p99, spread.max):
        yield "-" if seconds is None else f"{seconds * 1000:.2f}"


def _show_ratios(comparisons: list[Comparison], benchmark: Benchmark) -> None:
    rounds = len(comparisons[0].ratios)
    first, second = (side.target.url for side in benchmark.sides)
    columns = ("median [range]", first, second, "ratio", "")
    print_table(columns, map(_ratio_row, comparisons), f"{rounds} rounds; a ratio above 1: {first} is the better one")


def _ratio_row(one: Comparison) -> tuple[str, ...]:
    scale = 1.0 if one.better == HIGHER else 1000.0
    unit = "" if one.better == HIGHER else ", ms"
    verdict = "" if one.clear else "within the spread"
    return (
        one.measure + unit,
        _range([value * scale for value in one.first]),
        _range([value * scale for value in one.second]),
        _range(one.ratios),
        verdict,
    )


def _range(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f} to {max(values):.2f}]"
