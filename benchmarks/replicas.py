"""Replicas: one engine with all threads against two with half of them each.

python benchmarks/replicas.py [--runs 5] [--quick] [--model PATH]
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path
from typing import Any

import llama_peers
import peers
import usage
from command import main
from completions import Answer, Ask, complete
from prompts import prompt
from scenario import Comparison, Options, Place, Scenario, interleave

SLOTS = 8
"""In all: two replicas have half of them each."""
STREAMS = (1, 2, 4, 8)
_FIGURES = (
    ("tokens_per_s", "tokens/s", "all answers' tokens"),
    ("first_p50_ms", "ms", "time to the first token (median)"),
    ("stream_tokens_per_s", "tokens/s", "one answer's pace (median)"),
)


def measure(options: Options) -> list[Comparison]:
    model = llama_peers.model(options)
    threads = max(2, os.cpu_count() or 2)
    sides = {
        f"slimproc, 1 x {threads} threads": (1, threads),
        f"2 x {threads // 2} thread{'s' if threads // 2 > 1 else ''}": (2, threads // 2),
    }
    streams = (1, 2) if options.quick else STREAMS
    ones = {
        name: lambda count=count, each=each: one_run(model, count, each, streams, quick=options.quick)
        for name, (count, each) in sides.items()
    }
    seen = interleave(ones, options.runs)
    found = [_compare(seen, count, *figure) for figure in _FIGURES for count in streams]
    found.append(_memory(seen))
    found[0].runs = [run for turn in zip(*seen.values(), strict=True) for run in turn]
    return found


def one_run(model: Path, count: int, threads: int, streams: tuple[int, ...], *, quick: bool) -> dict[str, Any]:
    """A fresh server, and all numbers of streams one after the other: what was seen, by that number."""
    amounts = {"--replicas": count, "--slots": SLOTS // count, "--context": 512, "--threads": threads, "--model": model}
    arguments = [str(part) for pair in amounts.items() for part in pair]
    found: dict[str, Any] = {}
    with peers.running(peers.Slimproc(*arguments)) as server:
        assert isinstance(server, peers.Slimproc)
        peers.wait_until(lambda: _all_ready(server), "all replicas are ready")
        complete(server.port, [Ask(prompt(8, n), 4) for n in range(SLOTS)], streams=SLOTS)
        for number in streams:
            tokens = 8 if quick else 64
            asks = [Ask(prompt(16, 1000 * number + n), tokens) for n in range(2 * number)]
            before = usage.cpu(server)
            answers, wall = complete(server.port, asks, streams=number)
            after = usage.cpu(server)
            found[str(number)] = _seen(answers, wall) | {"cpu_s": {name: after[name] - before[name] for name in before}}
        found["memory_mib"] = usage.memory(server)
    return found | {"load_average": os.getloadavg()[0]}


def _all_ready(server: peers.Slimproc) -> bool:
    return all(one["state"] == "ready" for one in server.admin("GET", "/admin/replicas")["replicas"])


def _seen(answers: list[Answer], wall: float) -> dict[str, Any]:
    paces = [(one.completion_tokens - 1) / (one.seconds - one.first_s) for one in answers]
    return {
        "tokens_per_s": sum(one.completion_tokens for one in answers) / wall,
        "first_p50_ms": statistics.median(one.first_s for one in answers) * 1000,
        "latency_p50_ms": statistics.median(one.seconds for one in answers) * 1000,
        "stream_tokens_per_s": statistics.median(paces),
        "answers_ms": [[one.first_s * 1000, one.seconds * 1000] for one in answers],
    }


def _compare(seen: dict[str, list[dict[str, Any]]], streams: int, key: str, unit: str, word: str) -> Comparison:
    values = {name: [run[str(streams)][key] for run in runs] for name, runs in seen.items()}
    label = f"{streams} stream{'s' if streams > 1 else ''}: {word}"
    place = Place(word, streams, "streams")
    return Comparison(label, unit, values, lower_is_better=unit == "ms", place=place)


def _memory(seen: dict[str, list[dict[str, Any]]]) -> Comparison:
    values = {name: [run["memory_mib"]["engines"]["peak"] for run in runs] for name, runs in seen.items()}
    shared = "; ".join(
        f"{name.removeprefix('slimproc, ')}: {statistics.median(run['memory_mib']['engines']['pss'] for run in runs):,.0f} MiB"
        for name, runs in seen.items()
        if all("pss" in run["memory_mib"]["engines"] for run in runs)
    )
    note = (
        f"with the pages of the model's file counted once for both engines (PSS at the end), {shared}" if shared else ""
    )
    return Comparison("the engines' resident memory at most", "MiB", values, None, True, note)


SCENARIOS = [
    Scenario(
        "replicas",
        "",
        "one engine with all threads against two with half of them each",
        f"closed loops of streaming requests for 64 tokens (prompts of 16 words), with {SLOTS} slots in all. Here one engine "
        "batches what runs beside each other, so that a second replica is not needed for that. A ratio above 1 means that one "
        "replica is the better choice.",
        "a crash, which takes one of two replicas and leaves the other; prompts that are long.",
        measure,
    )
]

if __name__ == "__main__":
    sys.exit(main(SCENARIOS, __doc__ or ""))
