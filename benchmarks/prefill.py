"""S13: what running answers notice of a long prompt that comes in beside them.

python benchmarks/prefill.py [--runs 5] [--quick] [--model PATH]
"""

from __future__ import annotations

import os
import selectors
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import llama_peers
import peers
from command import main
from completions import Ask, Exchange
from prompts import prompt
from scenario import Comparison, Options, Scenario

STREAMS = 7
WORDS = 1990
"""Of the prompt that comes in: 2,000 tokens."""
_QUIET = 80
"""Tokens of each running answer, before the prompt comes, whose distances count as the quiet ones."""
_SLOWED = 3.0


class Running(Exchange):
    """An answer that goes on until nobody wants it any more; ``times`` has an instant for each arrival of tokens."""

    def __init__(self, port: int, ask: Ask) -> None:
        super().__init__(port, ask)
        self.times: list[float] = []

    def note(self, now: float) -> None:
        """Take what has come. RuntimeError: it has ended, or was refused."""
        if self.read():
            raise RuntimeError(f"an answer ended before the prompt had come in: {bytes(self.received[-600:])!r}")
        if self.first:
            self.times.append(now)

    def distances(self, begin: float, end: float) -> list[float]:
        """Milliseconds between neighbours, from the last arrival before ``begin`` to the first after ``end``."""
        first = max(0, sum(time <= begin for time in self.times) - 1)
        last = sum(time < end for time in self.times)
        return [(later - earlier) * 1000 for earlier, later in pairwise(self.times[first : last + 1])]


def beside_answers(options: Options) -> list[Comparison]:
    model = llama_peers.model(options)
    found = []
    for threads in (1,) if options.quick else (1, 2):
        seen = [come_in(model, threads, quick=options.quick) for _ in range(options.runs)]
        of = f"{STREAMS} streams beside a prompt of {seen[0]['prompt_tokens']} tokens, {threads} thread"
        of += "s" if threads > 1 else ""
        slowed = Comparison(
            f"{of}: inter-token p99 against the quiet one", "x", _values(seen, "slowed"), _SLOWED, lower_is_better=True
        )
        slowed.note = _distances(seen)
        slowed.runs = seen
        found.append(slowed)
        first = _values(seen, "prompt_first_s")
        found.append(
            Comparison(f"{of}: that prompt's first token", "s", first, lower_is_better=True, note=_alone(seen))
        )
    return found


def come_in(model: Path, threads: int, *, quick: bool) -> dict[str, Any]:
    """One run with a fresh server: answers alone, then beside the prompt; then another such prompt with nothing beside."""
    words, quiet_tokens = (200, 8) if quick else (WORDS, _QUIET)
    amounts = ("--slots", str(STREAMS + 1), "--context", "4096", "--threads", str(threads))
    limit = str(10 * peers.LIMIT)  # of a request: on a slow machine the answers go on for minutes
    with peers.running(peers.Slimproc("--model", str(model), *amounts, SLIMPROC_REQUEST_TIMEOUT=limit)) as server:
        asks = [Ask(prompt(8, seed), 3000) for seed in range(1, STREAMS + 1)]
        running = [Running(server.port, ask) for ask in asks]
        _pump(running, lambda: min(len(one.times) for one in running) > quiet_tokens // 4)
        begun = max(one.times[-1] for one in running)
        enough = [len(one.times) + quiet_tokens for one in running]
        _pump(running, lambda: all(len(one.times) >= count for one, count in zip(running, enough, strict=True)))
        long = Exchange(server.port, Ask(prompt(words, 100), 4))
        _pump(running, lambda: bool(long.first), long)
        quiet = [gap for one in running for gap in one.distances(begun, long.began)]
        beside = [gap for one in running for gap in one.distances(long.began, long.first)]
        for one in running:
            one.sock.close()
        _pump([], lambda: bool(long.ended), long)
        alone = Exchange(server.port, Ask(prompt(words, 101), 4))
        _pump([], lambda: bool(alone.ended), alone)
    for one in (long, alone):
        one.sock.close()
    return {
        "slowed": _p99(beside) / _p99(quiet),
        "quiet_p50_ms": statistics.median(quiet),
        "quiet_p99_ms": _p99(quiet),
        "beside_p50_ms": statistics.median(beside),
        "beside_p99_ms": _p99(beside),
        "beside_longest_ms": max(beside),
        "distances": [len(quiet), len(beside)],
        "prompt_tokens": long.answer().prompt_tokens,
        "prompt_first_s": long.answer().first_s,
        "alone_first_s": alone.answer().first_s,
        "load_average": os.getloadavg()[0],
    }


def _pump(running: list[Running], until: Callable[[], bool], other: Exchange | None = None) -> None:
    """Read all of them as it comes. RuntimeError: nothing comes any more."""
    with selectors.DefaultSelector() as selector:
        for exchange in (*running, *([other] if other else [])):
            selector.register(exchange.sock, selectors.EVENT_READ, exchange)
        while not until():
            ready = selector.select(peers.LIMIT)
            if not ready:
                raise RuntimeError(f"nothing came for {peers.LIMIT:g} s")
            for key, _ in ready:
                if isinstance(key.data, Running):
                    key.data.note(time.perf_counter())
                elif key.data.read():
                    selector.unregister(key.fileobj)


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def _values(seen: list[dict[str, Any]], by: str) -> dict[str, list[float]]:
    return {"slimproc": [run[by] for run in seen]}


def _distances(seen: list[dict[str, Any]]) -> str:
    keys = ("quiet_p50_ms", "quiet_p99_ms", "beside_p50_ms", "beside_p99_ms", "beside_longest_ms")
    quiet, quiet99, beside, beside99, longest = (statistics.median(run[key] for run in seen) for key in keys)
    return (
        f"quiet p50 {quiet:.0f} ms, p99 {quiet99:.0f} ms; beside the prompt p50 {beside:.0f} ms, p99 {beside99:.0f} ms, "
        f"longest {longest:.0f} ms (medians of the runs)"
    )


def _alone(seen: list[dict[str, Any]]) -> str:
    return (
        f"{statistics.median(run['alone_first_s'] for run in seen):.2f} s for another such prompt with nothing beside"
    )


SCENARIOS = [
    Scenario(
        "prefill",
        "S13",
        "running answers beside a long prompt that comes in",
        f"the time from token to token of {STREAMS} streaming answers, as a client sees it over HTTP: the 99th percentile "
        f"while a prompt of about 2,000 tokens is read, over the one before it came ({_QUIET} tokens of each answer). And "
        "how soon that prompt has its first token, which must not be starved for it. Every run has a fresh server.",
        "more than one such prompt at a time, and prompts that are known in part. Fewer than 7 answers, beside which a "
        "call takes at least 16 tokens of the prompt and may stretch a step beyond three (decision 14).",
        beside_answers,
    ),
]

if __name__ == "__main__":
    sys.exit(main(SCENARIOS, __doc__ or ""))
