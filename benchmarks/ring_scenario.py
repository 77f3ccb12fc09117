"""S1 as a scenario: runs ring.py and takes over what it found."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from scenario import HERE, Comparison, Options, Scenario


def against_socketpair(options: Options) -> list[Comparison]:
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory) / "ring.json"
        seconds = 0.02 if options.quick else 1.0
        amount = ["--json", str(made), "--repeats", str(options.runs), "--seconds", str(seconds)]
        subprocess.run([sys.executable, str(HERE / "ring.py"), *amount], check=True, stdout=subprocess.DEVNULL)
        found = json.loads(made.read_text())
    return [
        Comparison(
            f"{result['tokens_per_frame']} tokens a frame",
            "frames/s",
            {"slimproc": result["frames_per_second"]["ring"], "socketpair": result["frames_per_second"]["socketpair"]},
            found["target"],
            note=f"{found['credit']} credit",
            runs=[result],
        )
        for result in found["results"]
    ]


SCENARIOS = [
    Scenario(
        "ring",
        "S1",
        "the ring against a unix socketpair that carries the same frames",
        "frames per second from one process to another, encoded by the writer and decoded by a callback of a uvloop loop.",
        "anything after the decoding; latency of single frames.",
        against_socketpair,
    )
]
