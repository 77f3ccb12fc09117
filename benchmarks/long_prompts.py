"""Long prompts: the time to the first token by the prompt's length, cold and from the cache.

python benchmarks/long_prompts.py [--runs 5] [--quick] [--model PATH]
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
from scenario import Comparison, Options, Place, Scenario

WORDS = (250, 500, 1000, 1900)
"""About as many tokens."""
ENDING = 16
"""Words of an ending of its own."""
_AGAIN = 3
_ANSWER = 16
SIDES = ("slimproc, the same again", "cold", "the same with another ending")


def measure(options: Options) -> list[Comparison]:
    model = llama_peers.model(options)
    words = (20, 40) if options.quick else WORDS
    found = []
    for threads in (1,) if options.quick else (1, 2):
        runs = [{"run": run} | one_run(model, threads, words, seed=10 * run) for run in range(options.runs)]
        found += _of(runs, words, threads)
    return found


def one_run(model: Path, threads: int, words: tuple[int, ...], *, seed: int) -> dict[str, Any]:
    """A fresh server with one slot, so that what it remembers is the prompt before; milliseconds by words and side."""
    amounts = ("--slots", "1", "--context", "2048", "--threads", str(threads))
    found: dict[str, Any] = {}
    with peers.running(peers.Slimproc("--model", str(model), *amounts)) as server:
        complete(server.port, [Ask(prompt(16, 1), _ANSWER)], streams=1)
        for place, count in enumerate(words):
            text = prompt(count, 1000 + seed + place)
            asks = [Ask(text, _ANSWER)] * (1 + _AGAIN)
            asks += [Ask(f"{text} {prompt(ENDING, 2000 + n)}", _ANSWER) for n in range(_AGAIN)]
            seen, _ = complete(server.port, asks, streams=1)
            found[str(count)] = _sides(seen)
        found["memory_mib"] = usage.memory(server)
    return found | {"load_average": os.getloadavg()[0]}


def _sides(seen: list[Answer]) -> dict[str, Any]:
    groups = dict(zip(SIDES, (seen[1 : 1 + _AGAIN], seen[:1], seen[1 + _AGAIN :]), strict=True))
    return {
        "prompt_tokens": seen[0].prompt_tokens,
        "first_ms": {side: statistics.median(one.first_s for one in ones) * 1000 for side, ones in groups.items()},
        "latency_ms": {side: statistics.median(one.seconds for one in ones) * 1000 for side, ones in groups.items()},
        "all_first_ms": {side: [one.first_s * 1000 for one in ones] for side, ones in groups.items()},
        "cached_tokens": {side: [one.cached_tokens for one in ones] for side, ones in groups.items()},
    }


def _of(runs: list[dict[str, Any]], words: tuple[int, ...], threads: int) -> list[Comparison]:
    found = []
    suffix = f"{threads} thread{'s' if threads > 1 else ''}"
    for count in words:
        ones = [run[str(count)] for run in runs]
        tokens = statistics.median(one["prompt_tokens"] for one in ones)
        values = {side: [one["first_ms"][side] for one in ones] for side in SIDES}
        place = Place(suffix, tokens, "tokens of the prompt", "ms to the first token")
        label = f"a prompt of {tokens:.0f} tokens, {suffix}: time to the first token"
        found.append(Comparison(label, "ms", values, None, True, _note(ones, tokens), place=place))
    found[0].runs = runs
    return found


def _note(ones: list[dict[str, Any]], tokens: float) -> str:
    cold = statistics.median(one["first_ms"]["cold"] for one in ones) / 1000
    cached = min(min(one["cached_tokens"][SIDES[0]]) for one in ones)
    whole = statistics.median(one["latency_ms"][SIDES[0]] for one in ones)
    return (
        f"cold, {tokens / cold:,.0f} prompt tokens/s; the same again takes {cached} tokens from the cache, and the whole "
        f"answer of {_ANSWER} tokens {whole:,.0f} ms"
    )


SCENARIOS = [
    Scenario(
        "long-prompts",
        "",
        "the time to the first token of long prompts, cold and from the cache",
        f"a real model with one slot of 2,048 tokens, alone on its server: prompts that it has never seen, each then "
        f"{_AGAIN} times again, and {_AGAIN} times with {ENDING} words more at the end, which differ. From sending a streaming "
        f"/v1/completions request to its first event; answers have {_ANSWER} tokens. Ratios are those of cold to the same again. "
        "Every run has a fresh server and other prompts.",
        "other servers (S7 has llama-server beside it), several prompts that compete for slots (S8), and what running "
        "answers notice of a long prompt (S13).",
        measure,
    )
]

if __name__ == "__main__":
    sys.exit(main(SCENARIOS, __doc__ or ""))
