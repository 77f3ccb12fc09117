"""S7 and S8: prompts whose beginning was seen before: the time to the first token, and what two replicas share out.

python benchmarks/prefix.py [known-prompt] [prefix-affinity] [--runs 5] [--quick] [--llama-server PATH] [--model PATH]
"""

from __future__ import annotations

import os
import random
import statistics
import sys
from collections.abc import Callable
from typing import Any

import llama_peers
import peers
from command import main
from completions import Answer, Ask, complete
from prompts import prompt
from scenario import Comparison, Options, Scenario, interleave

# --- S7 ----------------------------------------------------------------------------------------------------------------

_AGAIN = 4
_ANSWER = 16
"""Tokens of each answer, so that a prompt seen before is not all that its slot holds."""


def against_llama_server(options: Options) -> list[Comparison]:
    executable = llama_peers.find("llama-server", options.llama_server)
    model = llama_peers.model(options)
    words, prompts = (40, 2) if options.quick else (990, 2)
    found = []
    for threads in (1,) if options.quick else (1, 2):
        sides = {
            side: lambda start=start: first_tokens(start, words, prompts)
            for side, start in llama_peers.servers(executable, model, slots=4, context=2048, threads=threads).items()
        }
        seen = interleave(sides, options.runs)
        of = f"a prompt of {_tokens(seen)} tokens, {threads} thread{'s' if threads > 1 else ''}"
        compare = {"unit": "ms", "seen": seen, "lower_is_better": True}
        found.append(llama_peers.compare(f"seen before: {of}", by="known_ms", target=1.0, **compare))
        found.append(llama_peers.compare(f"never seen: {of}", by="unseen_ms", target=None, **compare))
    found[0].note = llama_peers.note("llama-server", executable)
    return found


def first_tokens(start: Callable[[], peers.Server], words: int, prompts: int) -> dict[str, Any]:
    """Each prompt once and then ``_AGAIN`` times, one after the other; medians in milliseconds."""
    with peers.running(start()) as server:
        complete(server.port, [Ask(prompt(words // 4, 1), _ANSWER)], streams=1)
        series = []
        for seed in range(2, prompts + 2):
            answers, _ = complete(server.port, [Ask(prompt(words, seed), _ANSWER)] * (1 + _AGAIN), streams=1)
            series.append(answers)
    return {
        "unseen_ms": statistics.median(first.first_s for first, *_ in series) * 1000,
        "known_ms": statistics.median(known.first_s for _, *again in series for known in again) * 1000,
        "all_ms": [[answer.first_s * 1000 for answer in answers] for answers in series],
        "cached_tokens": [[answer.cached_tokens for answer in answers] for answers in series],
        "prompt_tokens": [first.prompt_tokens for first, *_ in series],
        "load_average": os.getloadavg()[0],
    }


def _tokens(seen: dict[str, list[dict[str, Any]]]) -> str:
    amounts = {tokens for runs in seen.values() for run in runs for tokens in run["prompt_tokens"]}
    return str(min(amounts)) if len(amounts) == 1 else f"{min(amounts)} to {max(amounts)}"


# --- S8 ----------------------------------------------------------------------------------------------------------------

PREFIXES = 8
SLOTS = 8
"""Of both sides in all: two replicas have half of them each."""


def against_one_replica(options: Options) -> list[Comparison]:
    model = llama_peers.model(options)
    words, count, streams = (60, 12, 2) if options.quick else (990, 40, 4)
    asks = shared(words, count, seed=8)
    common = ("--model", str(model), "--context", "2048")
    two = (*common, "--replicas", "2", "--slots", str(SLOTS // 2), "--threads", "1")
    one = (*common, "--slots", str(SLOTS), "--threads", "2")
    seen = interleave(
        {
            "slimproc": lambda: cached_share(two, streams, asks),
            "one replica": lambda: cached_share(one, streams, asks),
        },
        options.runs,
    )
    label = f"2 replicas of {SLOTS // 2} slots, {streams} streams, {PREFIXES} prefixes: prompt tokens from cache"
    comparison = llama_peers.compare(label, "%", seen, "cached_percent", target=0.95, peer="one replica")
    comparison.note = (
        f"{_speeds(seen)}. With each prefix read once and never again it would be {_most(asks, words):.1f} %"
    )
    return [comparison]


def shared(words: int, count: int, *, seed: int) -> list[Ask]:
    """Prompts with one of the prefixes each, at random, and an ending of their own; the same in every run."""
    chosen = random.Random(seed)
    prefixes = [prompt(words, number) for number in range(PREFIXES)]
    return [
        Ask(f"{chosen.choice(prefixes)} {prompt(chosen.randint(10, 80), 1000 + n)}", chosen.randint(8, 40))
        for n in range(count)
    ]


def _most(asks: list[Ask], words: int) -> float:
    """The share, in percent of the words, that is left to a cache which loses nothing."""
    beginnings = {ask.prompt.split(":")[0] for ask in asks}
    return (len(asks) - len(beginnings)) * words / sum(len(ask.prompt.split()) for ask in asks) * 100


def cached_share(arguments: tuple[str, ...], streams: int, asks: list[Ask]) -> dict[str, Any]:
    with peers.running(peers.Slimproc(*arguments)) as server:
        assert isinstance(server, peers.Slimproc)
        answers, wall = complete(server.port, asks, streams=streams)
        replicas = server.admin("GET", "/admin/replicas")["replicas"]
    return _of(answers) | {
        "first_token_p50_ms": statistics.median(answer.first_s for answer in answers) * 1000,
        "wall_s": wall,
        "replicas": [{key: found.get(key) for key in ("name", "tokens", "steps")} for found in replicas],
        "load_average": os.getloadavg()[0],
    }


def _of(answers: list[Answer]) -> dict[str, Any]:
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    cached = sum(answer.cached_tokens for answer in answers)
    return {
        "cached_percent": cached / prompt_tokens * 100,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached,
        "misses": sum(answer.cached_tokens < answer.prompt_tokens / 2 for answer in answers),
    }


def _speeds(seen: dict[str, list[dict[str, Any]]]) -> str:
    """What came of it: prefixes that had to be read, and the time to the first token."""
    parts = []
    for side, runs in seen.items():
        misses = statistics.median(run["misses"] for run in runs)
        first = statistics.median(run["first_token_p50_ms"] for run in runs)
        parts.append(f"{side}: {misses:g} prompts read anew, first token after {first:.0f} ms (medians)")
    return ", ".join(parts)


SCENARIOS = [
    Scenario(
        "known-prompt",
        "S7",
        "time to the first token of a prompt that was seen before, against llama-server",
        "from sending a streaming /v1/completions request to its first event, alone on a server with 4 slots of 2,048 "
        f"tokens: first with a prompt that the server has never seen, then with the same again, after an answer of "
        f"{_ANSWER} tokens each time. Both cache prompts as they do by default; llama-server's copies in host memory are "
        "off. A run's value is the median over two prompts and four repetitions of each.",
        "prompts that are known in part, other requests beside it, and a prompt whose slot another one has taken.",
        against_llama_server,
    ),
    Scenario(
        "prefix-affinity",
        "S8",
        "prompt tokens taken from cache by two replicas, against one with as many slots",
        f"{PREFIXES} long prefixes at random, each request with an ending of its own (10 to 80 words) and an answer of 8 "
        "to 40 tokens, in a closed loop with as many streams as keep both replicas busy. The share is that of cached_tokens in "
        "prompt_tokens, summed over all answers' usage. Both sides get the same requests and have as many slots and "
        "threads in all.",
        "speed. With as many streams as slots there is only one free slot at a time, and no choice left.",
        against_one_replica,
    ),
]

if __name__ == "__main__":
    sys.exit(main(SCENARIOS, __doc__ or ""))
