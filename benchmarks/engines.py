"""S5 and S6: tokens a second of a real model, against llama-server over HTTP and against llama-batched-bench inside.

python benchmarks/engines.py [llama-server] [batched-bench] [--runs 5] [--quick] [--llama-server PATH]
    [--llama-batched-bench PATH] [--model PATH]
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_peers
import peers
import usage
from command import main
from completions import Ask, complete
from prompts import prompt
from scenario import Comparison, Options, Place, Scenario, interleave

SLOTS = 16
CONTEXT = 1024
THREADS = (1, 2)

# --- S5 ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """What all streams together ask for, one after the other on each."""

    label: str
    streams: int
    asks: list[Ask]
    target: float


def loads(options: Options) -> list[Load]:
    if options.quick:
        return [Load("2 streams of unequal lengths", 2, _unequal(4, seed=1, prompts=(4, 16), answers=(4, 8)), 1.1)]
    return [
        Load("1 stream", 1, [Ask(prompt(16, seed), 96) for seed in range(1, 3)], 0.97),
        Load(f"{SLOTS} streams in step", SLOTS, [Ask(prompt(16, seed), 48) for seed in range(1, SLOTS + 1)], 1.0),
        Load("4 streams of unequal lengths", 4, _unequal(8, seed=4), 1.1),
        Load("8 streams of unequal lengths", 8, _unequal(16, seed=8), 1.1),
    ]


def _unequal(
    count: int, *, seed: int, prompts: tuple[int, int] = (16, 400), answers: tuple[int, int] = (32, 192)
) -> list[Ask]:
    """The same in every run, so that what differs between two runs is not the work."""
    chosen = random.Random(seed)
    return [Ask(prompt(chosen.randint(*prompts), 1000 * seed + n), chosen.randint(*answers)) for n in range(count)]


def answered(start: Callable[[], peers.Server], load: Load) -> dict[str, Any]:
    """Start a server, let each stream's slot and connection answer once, measure, stop it."""
    with peers.running(start()) as server:
        complete(server.port, [Ask(prompt(8, -1 - n), 4) for n in range(load.streams)], streams=load.streams)
        before = server.cpu()
        answers, wall = complete(server.port, load.asks, streams=load.streams)
        after = server.cpu()
        memory = usage.memory(server)
    tokens = sum(answer.completion_tokens for answer in answers)
    return {
        "tokens_per_s": tokens / wall,
        "tokens": tokens,
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "cached_tokens": sum(answer.cached_tokens for answer in answers),
        "wall_s": wall,
        "first_token_s": sorted(answer.first_s for answer in answers),
        "cpu_ms_per_token": {name: (after[name] - before[name]) / tokens * 1e3 for name in before},
        "memory_mib": memory,
        "load_average": os.getloadavg()[0],
    }


def against_llama_server(options: Options) -> list[Comparison]:
    executable = llama_peers.find("llama-server", options.llama_server)
    model = llama_peers.model(options)
    found = []
    for threads in THREADS[:1] if options.quick else THREADS:
        for load in loads(options):
            settings = {"slots": SLOTS, "context": CONTEXT, "threads": threads}
            sides = {
                side: lambda start=start, load=load: answered(start, load)
                for side, start in llama_peers.servers(executable, model, **settings).items()
            }
            seen = interleave(sides, options.runs)
            _check_same_work(seen)
            label = f"{load.label}, {_threads(threads)}"
            found.append(llama_peers.compare(label, "tokens/s", seen, "tokens_per_s", target=load.target))
    found[0].note = llama_peers.note("llama-server", executable)
    return found


def _check_same_work(seen: dict[str, list[dict[str, Any]]]) -> None:
    amounts = {(run["prompt_tokens"], run["tokens"]) for runs in seen.values() for run in runs}
    if len(amounts) != 1:
        raise RuntimeError(f"the sides did not do the same work (prompt tokens, tokens): {sorted(amounts)}")


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


# --- S6 ----------------------------------------------------------------------------------------------------------------

_PROMPT = 16
"""Tokens of each sequence before it decodes."""


def against_batched_bench(options: Options) -> list[Comparison]:
    executable = llama_peers.find("llama-batched-bench", options.llama_batched_bench)
    model = llama_peers.model(options)
    sequences, steps = ((1, 2), 8) if options.quick else ((1, 4, 8, 16), 48)
    found = []
    for threads in THREADS[:1] if options.quick else THREADS:
        shape = {"sequences": sequences, "steps": steps, "threads": threads}
        sides = {"slimproc": lambda shape=shape: backend_rates(model, **shape)}
        if executable is not None:
            sides["llama-batched-bench"] = lambda shape=shape: bench_rates(executable, model, **shape)
        seen = interleave(sides, options.runs)
        for count in sequences:
            label = f"{count} sequence{'s' if count > 1 else ''}, {_threads(threads)}"
            comparison = llama_peers.compare(
                label, "tokens/s", seen, str(count), target=0.95, peer="llama-batched-bench"
            )
            comparison.note = _parts(seen["slimproc"], count)
            comparison.place = Place(_threads(threads), count, "sequences")
            found.append(comparison)
    found[0].note += f". {llama_peers.note('llama-batched-bench', executable)}"
    return found


def backend_rates(model: Path, *, sequences: tuple[int, ...], steps: int, threads: int) -> dict[str, Any]:
    """Tokens a second by the number of sequences, of slimproc's backend in a process of its own."""
    amounts = ["--slots", SLOTS, "--context", CONTEXT, "--steps", steps, "--threads", threads]
    amounts += ["--prompt-tokens", _PROMPT, "--modes", "greedy", "--sequences", *sequences]
    command = [sys.executable, peers.HERE / "llama_step.py", "--json", "--model", model, *amounts]
    rows = _json_lines(command)
    return {str(row["sequences"]): row["tokens_per_s"] for row in rows} | {"rows": rows}


def bench_rates(
    executable: Path, model: Path, *, sequences: tuple[int, ...], steps: int, threads: int
) -> dict[str, Any]:
    """The same of llama-batched-bench. It makes a KV cache for as many sequences as its largest batch."""
    amounts = ["-c", SLOTS * CONTEXT, "-b", 2048, "-ub", 512, "-npp", _PROMPT, "-ntg", steps, "-t", threads]
    amounts += ["-npl", ",".join(map(str, sequences)), "-fa", "off", "--output-format", "jsonl"]
    rows = _json_lines([executable, "-m", model, *amounts, *llama_peers.kernel_arguments()])
    return {str(row["pl"]): row["speed_tg"] for row in rows} | {"rows": rows}


def _json_lines(command: list[object]) -> list[dict[str, Any]]:
    """The lines of a program's output that are JSON objects. RuntimeError: it failed."""
    environ = {**os.environ, "PYTHONPATH": str(peers.ROOT)}
    ran = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, env=environ)
    rows = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    if ran.returncode or not rows:
        raise RuntimeError(f"{command[0]} ended with {ran.returncode}: {(ran.stderr or ran.stdout)[-2000:]}")
    return rows


def _parts(runs: list[dict[str, Any]], count: int) -> str:
    rows = sorted((row for run in runs for row in run["rows"] if row["sequences"] == count), key=lambda row: row["ms"])
    parts = rows[len(rows) // 2]["parts"]
    rest = 1 - sum(parts.values())
    return f"of slimproc's step {', '.join(f'{name} {share:.2%}' for name, share in parts.items())}, rest {rest:.2%}"


SCENARIOS = [
    Scenario(
        "llama-server",
        "S5",
        "tokens a second of a real model over HTTP, against llama-server",
        "tokens that a closed loop of streaming /v1/completions requests gets, from the first request sent to the last "
        f"answer's end, prefills included. Both servers have {SLOTS} slots of {CONTEXT} tokens and as many threads, decode "
        "greedily, and get the same prompts, none of which begins like another; ignore_eos makes every answer as long as "
        "was asked. Tokens are those of each answer's usage, and both sides must count the same. Unequal: prompts of 16 "
        "to 400 words (about a token each), answers of 32 to 192 tokens.",
        "sampling other than greedy, prompts that are known already (S7), and a machine with cores to spare: client, "
        "front and engine share the cores here. A short run's last answers run in a batch that empties, on both sides.",
        against_llama_server,
    ),
    Scenario(
        "batched-bench",
        "S6",
        "decoding inside the engine, against llama-batched-bench",
        f"tokens a second of 1 to 16 sequences that only decode, each after a prompt of {_PROMPT} tokens. slimproc's side "
        "is its backend in one process with everything that a step does there: filling the batch, llama_decode, choosing "
        "the token (greedy), its text. The bench decodes random tokens and chooses none. The context is as large on both "
        "sides, and attention is the same (plain, slimproc's own choice on a CPU; see decision 14).",
        "prefill, the ring and the front, which S5 has.",
        against_batched_bench,
    ),
]

if __name__ == "__main__":
    sys.exit(main(SCENARIOS, __doc__ or ""))
