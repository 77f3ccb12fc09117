"""S10: a thousand streams beside thirty-two: what a token costs the front, and what a stream that waits takes of memory.

python benchmarks/many_streams.py [--runs 5] [--quick]
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import client
import peers
import usage
from command import main
from held import Held, raise_open_files
from scenario import Comparison, Options, Place, Scenario, interleave
from serving import _writes

COST_LIMIT = 1.2
"""Times what a token costs with few streams."""
RSS_LIMIT_KIB = 64.0
PROMPT_BYTES = 1000
IDLE = 300.0
"""Seconds between two tokens of a stream that waits: nothing comes while it is looked at."""


@dataclass(frozen=True)
class Shape:
    replicas: int
    slots: int
    """Of each replica; 256 is the most."""
    many: int
    few: int
    rate: int
    """Tokens a second of all streams together, where they are paced."""
    seconds: float


FULL = Shape(replicas=4, slots=250, many=1000, few=32, rate=10_000, seconds=3.0)
QUICK = Shape(replicas=2, slots=12, many=24, few=8, rate=2_000, seconds=0.3)


@contextlib.contextmanager
def serving(shape: Shape, token_latency: float) -> Iterator[peers.Slimproc]:
    """With all replicas ready."""
    model = {
        "backend": "fake",
        "replicas": shape.replicas,
        "slots": shape.slots,
        "context": 1_000_000,
        "max_queue": 2 * shape.many,
        "fake": {"token_latency": token_latency},
    }
    limits = {"max_queue_total": 2 * shape.many, "request_timeout": 600, "keepalive_after": 300, "stall_timeout": 600}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(json.dumps({"log_level": "warning", **limits, "models": {"fake": model}}))
        file.flush()
        with peers.running(peers.Slimproc("--config", file.name, port=peers.free_port())) as server:
            assert isinstance(server, peers.Slimproc)
            peers.wait_until(
                lambda: all(one["state"] == "ready" for one in _replicas(server)), "all replicas are ready"
            )
            yield server


def _replicas(server: peers.Slimproc) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.admin("GET", "/admin/replicas")["replicas"]
    return found


# --- what a token costs ------------------------------------------------------------------------------------------------


def cost(shape: Shape, streams: int, group: int | None) -> dict[str, Any]:
    """CPU time of a token while all streams run: their beginnings and ends are not in it. ``group``: so many streams
    get their tokens together, in steps of their own; None: all flat out.
    """
    latency = streams / shape.rate if group else 0.0

    def prompt(number: int) -> str:
        """Sequences with the same latency are in the same steps, and no others."""
        place = number // group if group else 0
        return f'{number} says\n!fake {{"token_latency": {latency * (1 + place * 1e-4)}}}'

    with serving(shape, latency) as server, Held(server.port, prompt) as held:
        began = time.perf_counter()
        held.open(streams)
        opening = time.perf_counter() - began
        held.run(shape.seconds / 5)
        before, writes, own = usage.cpu(server), _writes(server), client._cpu()
        began = time.perf_counter()
        tokens = held.run(shape.seconds)
        wall, own = time.perf_counter() - began, client._cpu() - own
        after, writes = usage.cpu(server), _writes(server) - writes
        memory = usage.memory(server)
    if not tokens:
        raise RuntimeError(f"no token came from {streams} streams in {shape.seconds:g} s")
    used = {name: (after[name] - before[name]) / tokens * 1e6 for name in before}
    return {
        "streams": streams,
        "front_us_per_token": used["front"],
        "cpu_us_per_token": used,
        "tokens": tokens,
        "tokens_per_s": tokens / wall,
        "wall_s": wall,
        "tokens_per_write": tokens / max(1, writes),
        "client_cpu_share": own / wall,
        "opening_s": opening,
        "memory_mib": memory,
    }


def costs(options: Options, shape: Shape) -> list[Comparison]:
    found = []
    paced = f"{shape.rate:,} tokens/s in all"
    ways = {f"{paced}, in steps as large": shape.few, f"{paced}, all in step": shape.many, "flat out": None}
    for how, group in ways.items():
        sides = {
            f"{streams:,} streams": lambda streams=streams, group=group: cost(shape, streams, group)
            for streams in (shape.many, shape.few)
        }
        seen = interleave(sides, options.runs)
        values = {side: [run["front_us_per_token"] for run in runs] for side, runs in seen.items()}
        runs = [run for turn in zip(*seen.values(), strict=True) for run in turn]
        note = "; ".join(_rates(side, runs) for side, runs in seen.items())
        label = f"{shape.many:,} streams against {shape.few}, {how}: the front's CPU time"
        target = round(1 / COST_LIMIT, 3) if group else None
        found.append(Comparison(label, "µs/token", values, target, True, note, runs))
    return found


def _rates(side: str, runs: list[dict[str, Any]]) -> str:
    keys = ("tokens_per_s", "tokens_per_write", "client_cpu_share")
    rate, joined, share = (statistics.median(run[key] for run in runs) for key in keys)
    return f"{side}: {rate:,.0f} tokens/s, {joined:.1f} tokens a write, the client took {share:.0%} of a core"


# --- what a stream that waits takes ------------------------------------------------------------------------------------


def idle(shape: Shape) -> dict[str, Any]:
    """The front's memory, with more and more streams that have had one token each and wait for the next."""
    with serving(shape, IDLE) as server:
        front = server.process.pid
        with Held(server.port, _filled) as first:  # what the first requests of all bring into memory
            first.open(4)
        peers.wait_until(lambda: not any(one["sequences"] for one in _replicas(server)), "the slots are free again")
        before = usage.rss(front)
        points = []
        with Held(server.port, _filled) as held:
            for count in _counts(shape):
                held.open(count - len(held))
                held.run(0.3)
                points.append({"streams": count, "rss": usage.rss(front)})
            memory = usage.memory(server)
        peers.wait_until(lambda: not any(one["sequences"] for one in _replicas(server)), "the streams are gone")
        after = usage.rss(front)
    per_stream = {str(one["streams"]): (one["rss"] - before) / one["streams"] / 1024 for one in points}
    return {"before": before, "points": points, "after": after, "kib_per_stream": per_stream, "memory_mib": memory}


def _filled(number: int) -> str:
    return f"{number} says ".ljust(PROMPT_BYTES, "x")


def _counts(shape: Shape) -> list[int]:
    return [shape.many // part for part in (8, 4, 2, 1)]


def rooms(options: Options, shape: Shape) -> list[Comparison]:
    runs = [{"run": run} | idle(shape) for run in range(options.runs)]
    found = []
    for count in _counts(shape):
        last = count == shape.many
        values = {"slimproc": [run["kib_per_stream"][str(count)] for run in runs]}
        place = Place("the front's memory for a stream that waits", count, "open streams")
        label = f"{count:,} streams that wait, prompts of {PROMPT_BYTES} bytes: the front's RSS for each"
        found.append(Comparison(label, "KiB", values, RSS_LIMIT_KIB if last else None, True, place=place))
    before, after = (statistics.median(run[key] for run in runs) / (1 << 20) for key in ("before", "after"))
    found[-1].note = f"RSS {before:.1f} MiB without any, {after:.1f} MiB after the last has gone (medians)"
    found[-1].runs = runs
    return found


def measure(options: Options) -> list[Comparison]:
    shape = QUICK if options.quick else FULL
    raise_open_files(shape.many)
    return costs(options, shape) + rooms(options, shape)


SCENARIOS = [
    Scenario(
        "many-streams",
        "S10",
        f"{FULL.many:,} streams beside {FULL.few}: the front's CPU time for a token, and its memory for a stream that waits",
        f"the fake backend with {FULL.replicas} replicas of {FULL.slots} slots, the same for both sides. CPU time of the "
        "front's process, divided by the events that a client counted in the same seconds, while all streams run. Paced: "
        f"{FULL.rate:,} tokens a second in all on both sides, so that {FULL.few} streams get a token every "
        f"{FULL.few / FULL.rate * 1000:g} ms, and {FULL.many:,} one every {FULL.many / FULL.rate * 1000:g} ms. In steps as "
        f"large: {FULL.few} streams get theirs together, {FULL.few // FULL.replicas} in a step of each engine, so that steps "
        "are as large and as many on both sides. All in step: every engine's streams get theirs together, as a model's do. "
        "Flat out: as fast as all processes together can, without a target, since other amounts are joined in a write "
        "(they are counted). Memory: the front's resident set with more and more streams open, each of which has had its "
        "first token and waits for the next, less what it was before (after some first requests), for each.",
        "the kernel's buffers of the connections, engines' memory, TLS, and slow clients, for which the front keeps more.",
        measure,
    )
]

if __name__ == "__main__":
    sys.exit(main(SCENARIOS, __doc__ or ""))
