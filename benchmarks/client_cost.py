"""What a load client costs: its CPU time for a token, against a bare server that writes prebuilt bytes (``floor.py``).

    python benchmarks/client_cost.py [--runs 5] [--streams 32] [--tokens 4000]

Both clients meet the same server in turns: ``slimproc bench``, which knows every answer's times and outcome, and
``client.py``, which only counts. The least of several runs is what a client costs; the rest is what else the machine did.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import client
import peers


def bench(port: int, streams: int, count: int, tokens: int) -> dict[str, float]:
    """``slimproc bench`` in a process of its own. RuntimeError: an answer failed."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "bench.json"
        amount = ["--streams", str(streams), "--requests", str(count), "--max-tokens", str(tokens)]
        command = [sys.executable, "-m", "slimproc", "bench", f"http://127.0.0.1:{port}", "--completions", *amount]
        ran = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True, check=False)
        if ran.returncode:
            raise RuntimeError(ran.stderr.strip())
        (summary,) = json.loads(file.read_text())["summary"]
    assert summary["tokens"] == count * tokens, "the bare server says no usage: its events are the tokens"
    return {"client_cpu_s": summary["client_cpu"], "tokens": summary["tokens"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4000, help="of each answer")
    options = parser.parse_args()
    print("CPU microseconds a token, least of the runs [all runs]")
    for load in (
        Load("1 token a write, flat out", tokens=options.tokens),
        Load("16 tokens a write, flat out", tokens=options.tokens // 16 * 16, per_write=16),
        Load("1 token a write, every 5 ms", tokens=400, every=0.005),
        Load("answers of one token", tokens=1, rounds=100),
    ):
        for name, found in compare(load, options.streams, options.runs).items():
            runs = ", ".join(f"{cost:.2f}" for cost in found)
            print(f"  {load.label:<28} {name:<15} {min(found):7.2f}  [{runs}]")


class Load(NamedTuple):
    label: str
    tokens: int
    per_write: int = 1
    every: float = 0.0
    rounds: int = 1
    """Requests of each stream."""


def compare(load: Load, streams: int, runs: int) -> dict[str, list[float]]:
    """CPU microseconds a token of each client."""
    costs: dict[str, list[float]] = {"slimproc bench": [], "client.py": []}
    shape = ("--per-write", load.per_write, "--every", load.every)
    floor = peers.OwnScript("floor.py", "--streams", streams, "--tokens", load.tokens, *shape)
    count, tokens = streams * load.rounds, load.tokens
    with peers.running(floor) as server:
        for _ in range(runs):
            for name, drive in (
                ("slimproc bench", lambda: bench(server.port, streams, count, tokens)),
                ("client.py", lambda: client.drive(server.port, streams=streams, count=count, tokens=tokens)),
            ):
                seen = drive()
                costs[name].append(seen["client_cpu_s"] / seen["tokens"] * 1e6)
    return costs


if __name__ == "__main__":
    main()
