"""Steps: how much of one is not decoding, and what each of the rules on the order of a batch is worth.

python benchmarks/steps.py [--runs 5] [--quick] [--model PATH]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_peers
import peers
from command import main
from scenario import Comparison, Options, Scenario, interleave

SLOTS = 16
CONTEXT = 256
_PROMPT = 16
MODES = ("greedy", "temperature 1", "top_p 0.95", "penalties")
_MOST_PERCENT = 3.0
"""Of a step, that what is not decoding may take."""


@dataclass(frozen=True)
class Side:
    """``in_slots``: where the sequences are, in the order in which they came. ``without``: the rule that is off."""

    name: str
    in_slots: tuple[int, ...]
    without: str | None = None


@dataclass(frozen=True)
class Rule:
    label: str
    kept: Side
    broken: Side


def rules() -> list[Rule]:
    shuffled = tuple(5 * place % SLOTS for place in range(SLOTS))  # no two neighbours follow one another
    gap = tuple(slot for slot in range(9) if slot != 4)
    every_second, every_third = tuple(range(0, SLOTS, 2)), tuple(range(0, SLOTS, 3))
    return [
        Rule("8 sequences, one single gap", Side("slimproc, a filler", gap), Side("the gap", gap, "fillers")),
        Rule(
            "8 sequences in every second slot",
            Side("slimproc, 7 fillers", every_second),
            Side("the gaps", every_second, "fillers"),
        ),
        Rule(
            f"{len(every_third)} sequences",
            Side("slimproc, the lowest slots", tuple(range(len(every_third)))),
            Side("every third slot", every_third),
        ),
        Rule(
            f"{SLOTS} sequences that came in any order",
            Side("slimproc, sorted by slot", shuffled),
            Side("in the order in which they came", shuffled, "order"),
        ),
    ]


def measure(options: Options) -> list[Comparison]:
    model = llama_peers.model(options)
    steps = 4 if options.quick else 64
    return [*shares(model, steps, options.runs), *(compare(rule, model, steps, options.runs) for rule in rules())]


# --- what is not decoding ---------------------------------------------------------------------------------------------


def shares(model: Path, steps: int, runs: int) -> list[Comparison]:
    seen: list[dict[str, Any]] = [{"run": run, "side": "slimproc"} for run in range(runs)]
    for one in seen:
        rows = step_rows(model, steps, ["--sequences", SLOTS, "--modes", *MODES])
        one |= {"rows": {row["mode"]: row for row in rows}, "load_average": os.getloadavg()[0]}
    found = []
    for mode in MODES:
        rows = [one["rows"][mode] for one in seen]
        percents = [100 * (1 - row["parts"]["decode"]) for row in rows]
        label = f"{SLOTS} sequences, {mode}: of a step, what is not decoding"
        found.append(Comparison(label, "%", {"slimproc": percents}, _MOST_PERCENT, lower_is_better=True))
        found[-1].note = _parts(rows)
    found[0].runs = seen
    return found


def _parts(rows: list[dict[str, Any]]) -> str:
    middle = sorted(rows, key=lambda row: row["ms"])[len(rows) // 2]
    parts = {name: share for name, share in middle["parts"].items() if name != "decode"}
    rest = 1 - sum(middle["parts"].values())
    said = ", ".join(f"{name} {share:.2%}" for name, share in (parts | {"text and all else": rest}).items())
    return f"{said}, of {middle['ms']:.1f} ms"


# --- the rules --------------------------------------------------------------------------------------------------------


def compare(rule: Rule, model: Path, steps: int, runs: int) -> Comparison:
    sides = {
        side.name: lambda side=side: one_side(side, model, steps) | {"load_average": os.getloadavg()[0]}
        for side in (rule.kept, rule.broken)
    }
    seen = interleave(sides, runs)
    values = {name: [run["ms"] for run in ran] for name, ran in seen.items()}
    found = Comparison(f"{rule.label}: a step", "ms", values, lower_is_better=True)
    found.runs = [run for turn in zip(*seen.values(), strict=True) for run in turn]
    calls = {name: statistics.median(run["parts"]["decode"] * run["ms"] for run in ran) for name, ran in seen.items()}
    found.note = "of it, decoding " + ", ".join(
        f"{name.removeprefix('slimproc, ')} {ms:.1f} ms" for name, ms in calls.items()
    )
    return found


def one_side(side: Side, model: Path, steps: int) -> dict[str, Any]:
    arguments = ["--sequences", len(side.in_slots), "--modes", "greedy", "--in-slots", *side.in_slots]
    (row,) = step_rows(model, steps, [*arguments, *(["--without", side.without] if side.without else [])])
    return row


def step_rows(model: Path, steps: int, arguments: list[Any]) -> list[dict[str, Any]]:
    """What ``llama_step.py`` says in a process of its own. RuntimeError: it failed."""
    amounts = ["--slots", SLOTS, "--context", CONTEXT, "--steps", steps, "--threads", 1, "--prompt-tokens", _PROMPT]
    command = [sys.executable, peers.HERE / "llama_step.py", "--json", "--model", model, *amounts, *arguments]
    environ = {**os.environ, "PYTHONPATH": str(peers.ROOT)}
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, env=environ)
    rows = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    if ran.returncode or not rows:
        raise RuntimeError(f"llama_step.py ended with {ran.returncode}: {(ran.stderr or ran.stdout)[-2000:]}")
    return rows


SCENARIOS = [
    Scenario(
        "steps",
        "",
        "of a step, what is not decoding; and what the order of a batch is worth",
        f"steps of the llama_cpp backend in a process of its own, 1 thread, {SLOTS} slots, in which all sequences decode: "
        "filling the batch, llama_decode, choosing the tokens, their text. And the same step with a rule of the batch and "
        "without it: single gaps are closed by fillers, the lowest slots are taken first, batches are sorted by slot. "
        "Each is switched off by itself, or the sequences are put into the slots that it would have avoided. A ratio above "
        "1 is what the rule gains.",
        "the ring and the front: publishing a step costs the engine at most 0.8 us a token (all of its time in S3), 13 us "
        "of a step of over 100 ms at 16 sequences. Longer contexts, where decoding itself takes longer and all else does not.",
        measure,
    )
]

if __name__ == "__main__":
    sys.exit(main(SCENARIOS, __doc__ or ""))
