"""S9: twice, and ten times, as many requests as can be served, arriving as they please: how much is still served well, how
soon the rest is told, and what is left of it afterwards.

python benchmarks/overload.py [--runs 5] [--quick]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import peers
import psutil
from command import main
from scenario import Comparison, Options, Scenario

SLOTS, QUEUE = 16, 16
TOKENS, LATENCY = 20, 0.01
"""An answer takes 0.2 s, so that 80 a second can be served."""
SATURATED = (16, 24, 32)
"""Streams of the closed loops, of which the best rate counts."""
OVER = (2.0, 10.0)
TTFT_MS = 500
"""A good answer's first token comes within this: the whole queue ahead takes 0.2 s."""
GOODPUT, REFUSAL_MS = 0.95, 10.0
RECOVERED, RECOVERS_IN = 0.95, 2.0
"""This share of the best rate, within so many seconds from the end of the overload."""
GROWTH_MIB = 64.0
"""What the front may have grown by, from before the overload to its end."""


def _config() -> str:
    fake = {"token_latency": LATENCY, "ttft": LATENCY}
    model = {"backend": "fake", "slots": SLOTS, "max_queue": QUEUE, "fake": fake}
    return json.dumps({"log_level": "warning", "models": {"fake": model}})


def load(server: peers.Server, *amount: str) -> dict[str, Any]:
    """One run of ``slimproc bench``; what it summarizes. RuntimeError when it fails."""
    with tempfile.TemporaryDirectory() as directory:
        found = Path(directory) / "found.json"
        command = [sys.executable, "-m", "slimproc", "bench", f"http://127.0.0.1:{server.port}", "--completions"]
        command += ["--max-tokens", str(TOKENS), "--slo-ttft", str(TTFT_MS), "--json", str(found), *amount]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if not found.exists():
            raise RuntimeError(f"slimproc bench ended with {ended.returncode}: {ended.stderr[-500:]}")
        summary: dict[str, Any] = json.loads(found.read_text())["summary"][0]
    return summary


def _resident(server: peers.Server) -> float:
    """MiB of the front."""
    return float(psutil.Process(server.process.pid).memory_info().rss) / (1 << 20)


def overload(run: int, over: float, *, quick: bool) -> dict[str, Any]:
    """A fresh server: closed loops, of which the best rate is what it can do; then an open loop at ``over`` times that
    rate; then, at once, the best closed loop again.
    """
    seconds = "1" if quick else "8"
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(_config())
        file.flush()
        with peers.running(peers.Slimproc("--config", file.name, port=peers.free_port())) as server:
            closed = {n: load(server, "--streams", str(n), "--duration", seconds) for n in SATURATED}
            best_of = max(closed, key=lambda streams: closed[streams]["goodput"])
            best = closed[best_of]["goodput"]
            resident, rate = _resident(server), f"{over * best:.1f}"
            opened = load(server, "--rate", rate, "--duration", "2" if quick else "20", "--seed", str(run))
            grown = _resident(server) - resident
            after = load(server, "--streams", str(best_of), "--duration", str(RECOVERS_IN))
    if opened["errors"] or after["errors"] or not after["ok"]:
        raise RuntimeError(f"requests failed: {opened['kinds']} {opened['examples']}; after it {after['kinds']}")
    return {
        "run": run,
        "best_closed": best,
        "goodput": opened["goodput"],
        "over": over,
        "offered": over * best,
        "goodput_after": after["goodput"],
        "grown_mib": grown,
        "refused": opened["refused"],
        "requests": opened["requests"],
        "refusal_p99_ms": opened["refusal"]["p99"] * 1000,
        "refusal_max_ms": opened["refusal"]["max"] * 1000,
        "late_p99_ms": opened["late"]["p99"] * 1000,
        "ttft_p99_ms": opened["ttft"]["p99"] * 1000,
    }


def measure(options: Options) -> list[Comparison]:
    return [one for over in OVER for one in _measure_at(over, options)]


def _measure_at(over: float, options: Options) -> list[Comparison]:
    seen = [overload(run, over, quick=options.quick) for run in range(options.runs)]
    best = [one["best_closed"] for one in seen]
    goodput = {"open loop": [one["goodput"] for one in seen], "best closed loop": best}
    after = {"afterwards": [one["goodput_after"] for one in seen], "best closed loop": best}
    refusals = {"slimproc": [one["refusal_p99_ms"] for one in seen]}
    grown = {"slimproc": [one["grown_mib"] for one in seen]}
    late = max(one["late_p99_ms"] for one in seen)
    ttft = max(one["ttft_p99_ms"] for one in seen)
    share = sum(one["refused"] for one in seen) / sum(one["requests"] for one in seen)
    note = f"{share:.0%} were refused; the client itself sent up to {late:.1f} ms late (p99)"
    at = f"at {over:g} times saturation"
    return [
        Comparison(
            f"good answers a second {at}", "1/s", goodput, GOODPUT, False,
            f"first token of those admitted: p99 at most {ttft:.0f} ms", seen,
        ),
        Comparison(f"a refusal's answer {at}, p99", "ms", refusals, REFUSAL_MS, True, note),
        Comparison(f"good answers a second in the {RECOVERS_IN:g} s after it, {at}", "1/s", after, RECOVERED),
        Comparison(f"what the front has grown by {at}", "MiB", grown, GROWTH_MIB, True),
    ]  # fmt: skip


SCENARIOS = [
    Scenario(
        "overload",
        "S9",
        "open loop at twice and ten times saturation against the best closed loop; how soon refusals are answered; what comes after",
        f"the fake backend with {SLOTS} slots, a queue of {QUEUE} and answers of {TOKENS} tokens in {TOKENS * LATENCY:g} s. Closed loops of "
        f"{SATURATED} streams; then Poisson arrivals at twice, and with a fresh server at ten times, the best of their rates, with times from the intended arrival. Good is an answer "
        f"whose first token came within {TTFT_MS} ms. Afterwards the best closed loop is run again, at once.",
        "a real model, whose own speed changes with its batch; clients that come back after a refusal.",
        measure,
    )
]

if __name__ == "__main__":
    sys.exit(main(SCENARIOS, __doc__ or ""))
