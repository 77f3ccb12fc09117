"""What the whole stack adds to a request, with an engine that computes nothing: answers a second, and their latency.

python benchmarks/overhead.py [--runs 5] [--quick] [--slim-serve PATH]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import answers
import peers
import usage
from command import main
from scenario import Comparison, Options, Place, Scenario, interleave

JOINED_TOKENS, STREAMED_TOKENS = 16, 64
SLOTS = 32
_QUANTILES = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)


@dataclass(frozen=True)
class Work:
    """``counts``: requests by how many are under way at a time."""

    tokens: int
    stream: bool
    counts: dict[int, int]
    warm: int


def _joined(options: Options) -> Work:
    counts = {1: 20, 4: 40} if options.quick else {1: 1500, 8: 3000, 32: 4000}
    return Work(JOINED_TOKENS, stream=False, counts=counts, warm=4 if options.quick else 100)


def _streamed(options: Options) -> Work:
    counts = {1: 10, 4: 20} if options.quick else {1: 200, 8: 400, 32: 400}
    return Work(STREAMED_TOKENS, stream=True, counts=counts, warm=4 if options.quick else 20)


def side(start: Callable[[], peers.Server], work: Work) -> dict[str, Any]:
    """A fresh server, and all counts one after the other: what was seen by how many were under way."""
    found: dict[str, Any] = {}
    with peers.running(start()) as server:
        for streams, count in work.counts.items():
            answers.drive(
                server.port, answers.requests(work.warm, tokens=work.tokens, stream=work.stream), streams=streams
            )
            before = usage.cpu(server)
            asked = answers.requests(count, tokens=work.tokens, stream=work.stream)
            loop = answers.drive(server.port, asked, streams=streams)
            after = usage.cpu(server)
            if work.stream:
                answers.check_events(loop, work.tokens)
            found[str(streams)] = _seen(loop) | {
                "cpu_us_per_request": {name: (after[name] - before[name]) / count * 1e6 for name in before},
            }
        found["memory_mib"] = usage.memory(server)
    return found


def _seen(loop: answers.Loop) -> dict[str, Any]:
    return {
        "requests": len(loop.answers),
        "requests_per_s": loop.per_s,
        "p50_ms": loop.quantile_ms(0.5),
        "p99_ms": loop.quantile_ms(0.99),
        "first_p50_ms": statistics.median(answer.first_s for answer in loop.answers) * 1000,
        "bytes_per_answer": statistics.median(answer.bytes for answer in loop.answers),
        "client_cpu_share": loop.client_cpu_s / loop.wall_s,
        "quantiles_ms": {str(share): loop.quantile_ms(share) for share in _QUANTILES},
    }


def compare(what: str, work: Work, seen: dict[str, list[dict[str, Any]]], peer: str) -> list[Comparison]:
    """Answers a second and the median latency, for each number under way."""
    found = []
    runs = [run for turn in zip(*seen.values(), strict=True) for run in turn]
    for key, unit, word in (("requests_per_s", "answers/s", "rate"), ("p50_ms", "ms", "latency (median)")):
        for streams in work.counts:
            values = {"slimproc": [], peer: []}
            values |= {name: [run[str(streams)][key] for run in runs] for name, runs in seen.items()}
            comparison = Comparison(f"{what}, {streams} at a time: {word}", unit, values)
            comparison.lower_is_better = key == "p50_ms"
            comparison.place = Place(f"{what}: {word}", streams, "requests at a time")
            comparison.note = _costs(seen, streams) if key == "requests_per_s" else _added(values)
            found.append(comparison)
    found[0].runs = runs
    return found


def _added(values: dict[str, list[float]]) -> str:
    ours, theirs = (statistics.median(side) if side else None for side in values.values())
    return "" if theirs is None else f"slimproc takes {ours - theirs:+.2f} ms"


def _costs(seen: dict[str, list[dict[str, Any]]], streams: int) -> str:
    parts = []
    for name, runs in seen.items():
        ones = [run[str(streams)] for run in runs]
        costs = {
            process: statistics.median(one["cpu_us_per_request"][process] for one in ones)
            for process in ones[0]["cpu_us_per_request"]
        }
        p99 = statistics.median(one["p99_ms"] for one in ones)
        share = statistics.median(one["client_cpu_share"] for one in ones)
        spent = ", ".join(f"{process} {cost:.0f}" for process, cost in costs.items())
        parts.append(f"{name}: CPU µs/answer {spent}; p99 {p99:.2f} ms; the client took {share:.0%} of a core")
    return ". ".join(parts)


def measure(options: Options) -> list[Comparison]:
    joined, streamed = _joined(options), _streamed(options)
    ours = lambda: peers.Slimproc("--backend", "fake", "--slots", str(SLOTS), "--context", "4096")  # noqa: E731  # as its like
    sides = {
        "slimproc": lambda: side(ours, joined),
        "bare aiohttp": lambda: side(lambda: peers.OwnScript("bare.py", "--tokens", JOINED_TOKENS), joined),
    }
    found = compare(f"whole answers of {JOINED_TOKENS} tokens", joined, interleave(sides, options.runs), "bare aiohttp")
    executable = peers.find_slim_serve(options.slim_serve)
    sides = {"slimproc": lambda: side(ours, streamed)}
    if executable is not None:
        sides["slim-serve"] = lambda: side(lambda: peers.slim_serve(executable, max_tokens=STREAMED_TOKENS), streamed)
    streams = compare(
        f"streamed answers of {STREAMED_TOKENS} tokens", streamed, interleave(sides, options.runs), "slim-serve"
    )
    version = peers.SLIM_SERVE_MISSING if executable is None else f"slim-serve {peers.slim_serve_version(executable)}"
    streams[0].note += f". {version}"
    return found + streams


SCENARIOS = [
    Scenario(
        "overhead",
        "",
        "what the stack adds to a short request, with an engine that computes nothing",
        f"closed loops over connections that stay open, on the fake backend without any latency and {SLOTS} slots. Whole "
        f"answers of {JOINED_TOKENS} tokens, against a bare aiohttp handler on uvloop that reads the request and writes as "
        "many bytes: the difference is what parsing, admission, the way to the engine's process and back, and two log "
        f"lines cost. Streamed answers of {STREAMED_TOKENS} tokens, against slim-serve with its fake engine, which runs one "
        "at a time. Rates and latencies are those of one client process on the same machine.",
        "a model's time, beside which all of this is small, and long streams (S2 to S4).",
        measure,
    )
]

if __name__ == "__main__":
    sys.exit(main(SCENARIOS, __doc__ or ""))
