"""S2, S3 and S4: tokens through HTTP, against slim-serve and against a bare uvloop server that only writes.

python benchmarks/serving.py [slim-serve] [joined-writes] [token-writes] [--runs 5] [--quick] [--slim-serve PATH]
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import client
import peers
import psutil
import usage
from command import main
from scenario import Comparison, Options, Place, Scenario, interleave

from slimproc.replicas.link import FRAMES_PER_WAKEUP

STREAMS = 32
JOINED = FRAMES_PER_WAKEUP
"""Tokens that the floor of S3 puts into one write: the most that slimproc joins."""


def measured(
    start: Callable[[], peers.Server], *, streams: int, count: int, tokens: int, warm: int, apart: bool = False
) -> dict[str, Any]:
    """Start a server, warm it up with answers of ``warm`` tokens, measure, stop it. ``apart``: server and client each
    have a core, where the system lets us say so, since else it may put both on one.
    """
    with peers.running(start()) as server, _cores(server, apart=apart):
        client.drive(server.port, streams=streams, count=streams, tokens=warm)
        before, writes = server.cpu(), _writes(server)
        seen = client.drive(server.port, streams=streams, count=count, tokens=tokens)
        after = server.cpu()
        total = seen["tokens"]
        used = {name: (after[name] - before[name]) / total * 1e6 for name in before}
        return {
            **seen,
            "bytes_per_token": seen["bytes"] / total,
            "cpu_us_per_token": used | {"client": seen["client_cpu_s"] / total * 1e6},
            "server_cpu_us_per_token": sum(used.values()),
            "writes_per_token": (_writes(server) - writes) / total,
            "memory_mib": usage.memory(server),
        }


@contextlib.contextmanager
def _cores(server: peers.Server, *, apart: bool) -> Iterator[None]:
    if not apart or not hasattr(os, "sched_setaffinity") or len(ours := sorted(os.sched_getaffinity(0))) < 2:
        yield
        return
    os.sched_setaffinity(server.process.pid, ours[:1])
    os.sched_setaffinity(0, ours[-1:])  # the client inherits it
    try:
        yield
    finally:
        os.sched_setaffinity(0, ours)


def _writes(server: peers.Server) -> int:
    """write(2) calls of the process that serves HTTP; 0 where the system does not count them."""
    process = psutil.Process(server.process.pid)
    return process.io_counters().write_count if hasattr(process, "io_counters") else 0


def slimproc(streams: int, tokens: int) -> Callable[[], peers.Server]:
    arguments = ("--backend", "fake", "--slots", str(streams), "--context", str(tokens + 64))
    return lambda: peers.Slimproc(*arguments)


def compare(
    label: str, sides: dict[str, Callable[[], dict[str, Any]]], options: Options, *, target: float | None, by: str = ""
) -> Comparison:
    """By tokens per second, or by the figure ``by``, of which less is better."""
    seen = interleave(sides, options.runs)
    values = {name: [run[by or "tokens_per_s"] for run in runs] for name, runs in seen.items()}
    runs = [run for pair in zip(*seen.values(), strict=True) for run in pair]
    unit = "µs/token" if by else "tokens/s"
    return Comparison(label, unit, values, target, lower_is_better=bool(by), note=_costs(seen), runs=runs)


def _costs(seen: dict[str, list[dict[str, Any]]]) -> str:
    """CPU time a token by process, and how much of a core the client took, in the run with the median rate."""
    parts = []
    for name, runs in seen.items():
        middle = sorted(runs, key=lambda run: run["tokens_per_s"])[len(runs) // 2]
        used = ", ".join(f"{process} {cost:.2f}" for process, cost in middle["cpu_us_per_token"].items())
        share = middle["client_cpu_share"]
        parts.append(f"{name}: CPU µs/token {used}; the client took {share:.0%} of a core")
    return ". ".join(parts)


# --- S2 ----------------------------------------------------------------------------------------------------------------


def against_slim_serve(options: Options) -> list[Comparison]:
    executable = peers.find_slim_serve(options.slim_serve)
    found = []
    for tokens, rounds in [(64, 1)] if options.quick else [(4096, 8), (1024, 16)]:
        common = {"streams": STREAMS, "tokens": tokens, "warm": min(tokens, 256)}
        sides = {
            "slimproc": lambda c=common, r=rounds: measured(slimproc(STREAMS, c["tokens"]), count=STREAMS * r, **c),
        }
        if executable is not None:
            start = lambda t=tokens: peers.slim_serve(executable, max_tokens=t)  # noqa: E731  # one line among its like
            sides["slim-serve"] = lambda c=common, s=start: measured(s, count=STREAMS, **c)
        label = f"{STREAMS} streams, answers of {tokens} tokens"
        comparison = compare(label, sides, options, target=30.0)
        if executable is None:
            comparison.values["slim-serve"] = []
            comparison.note += f". {peers.SLIM_SERVE_MISSING}"
        else:
            comparison.note += f". slim-serve {peers.slim_serve_version(executable)}"
        found.append(comparison)
    return found


# --- S3 ----------------------------------------------------------------------------------------------------------------


def against_joined_writes(options: Options) -> list[Comparison]:
    tokens = JOINED * (8 if options.quick else 2560)
    common = {"streams": STREAMS, "count": STREAMS, "tokens": tokens, "warm": JOINED * 4}
    floor = ("floor.py", "--streams", STREAMS, "--tokens", tokens, "--per-write", JOINED)
    sides = {
        "slimproc": lambda: measured(slimproc(STREAMS, tokens), **common),
        "raw uvloop": lambda: measured(lambda: peers.OwnScript(*floor), **common),
    }
    label = f"{STREAMS} streams, answers of {tokens} tokens, {JOINED} tokens a raw write"
    return [compare(label, sides, options, target=0.45)]


# --- S4 ----------------------------------------------------------------------------------------------------------------


def against_token_writes(options: Options) -> list[Comparison]:
    found = []
    for streams in (8,) if options.quick else (8, 64, 256):
        tokens = 64 if options.quick else 400_000 // streams
        found.append(_token_writes(options, streams, tokens, every=0.0))
    for streams, every in ((8, 0.001),) if options.quick else ((8, 0.001), (64, 0.002), (256, 0.005)):
        tokens = 64 if options.quick else round(2 / every)
        found.append(_token_writes(options, streams, tokens, every=every))
    return found


def _token_writes(options: Options, streams: int, tokens: int, *, every: float) -> Comparison:
    common = {"streams": streams, "count": streams, "tokens": tokens, "warm": 32, "apart": True}
    arguments = ("--streams", streams, "--tokens", tokens, "--every", every)
    sides = {
        "slimproc": lambda: measured(lambda: peers.OwnScript("dataplane.py", *arguments), **common),
        "raw uvloop": lambda: measured(lambda: peers.OwnScript("floor.py", *arguments, "--per-write", 1), **common),
    }
    if every:
        label = f"{streams} streams, a step every {every * 1000:g} ms, the server's CPU time"
        comparison = compare(label, sides, options, target=None, by="server_cpu_us_per_token")
        comparison.place = Place("paced", streams, "streams", "CPU time of the server, µs/token")
        return comparison
    comparison = compare(f"{streams} streams, {tokens} steps, flat out", sides, options, target=0.85)
    comparison.place = Place("flat out", streams, "streams")
    most = max(run["writes_per_token"] for run in comparison.runs)
    least = min(run["writes_per_token"] for run in comparison.runs)
    comparison.note += f". Writes a token: {least:.3f} to {most:.3f}"
    return comparison


SCENARIOS = [
    Scenario(
        "slim-serve",
        "S2",
        "the whole stack against slim-serve, both with their fake engine flat out",
        "SSE token events per second over /v1/completions that one client process takes from a whole server (front, ring "
        "and engine process) with 32 requests at a time, from the first request sent to the last answer's end. The fake "
        "engines compute nothing and give the same texts; both sides get the same requests, slimproc more of them so that "
        "it runs as long. slim-serve runs one engine thread, as it does by default, with SLM_MAX_TOKENS_LIMIT raised to "
        "the longest answer.",
        "a model's speed, and latency. The two designs differ: slim-serve runs one answer after the other, slimproc 32 "
        "beside each other. Every answer also costs slimproc one HTTP request, which weighs more with shorter ones.",
        against_slim_serve,
    ),
    Scenario(
        "joined-writes",
        "S3",
        "the whole stack flat out against raw uvloop writes of the same bytes, joined",
        f"the same with one long answer a stream and no stop strings, against a server that writes prebuilt chunks of "
        f"{JOINED} events, one write a stream in turn. {JOINED} is the most that slimproc joins in a wake-up. The floor has "
        "one process, slimproc two, and the client is a third: on two cores this is part of what is measured.",
        "answers with stop strings, which the engine searches for, and more than one core for each process.",
        against_joined_writes,
    ),
    Scenario(
        "token-writes",
        "S4",
        "one token a stream and wake-up, against raw uvloop writes of the same bytes",
        "the front in one process (routes, admission, decoding of a step, hand-out, events, writes) with a token source "
        "in its own loop, which makes one step a turn; the floor is the same source and one write of a prebuilt chunk a "
        "token. Both wait alike while a client's kernel buffer is full, so that a token is one write(2): writes a token "
        "are counted. Server and client are held on a core each, where the system can do that. Flat out: tokens per "
        "second, the target. Paced: CPU time of the server's process a token, with clients that sleep between two steps "
        "as they do behind a real model; the ratio is raw over slimproc.",
        "the ring (S1 and S3 have it) and the engine. A write costs more where it wakes a sleeping client, so a client "
        "that cannot keep up makes raw writes cheap and the ratio worse.",
        against_token_writes,
    ),
]

if __name__ == "__main__":
    sys.exit(main(SCENARIOS, __doc__ or ""))
