"""The command line of every script that measures: which scenarios, how often, and where the results go."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import machine
import plots
import report
from scenario import HERE, SMOLLM2, Missing, Options, Scenario

IDLE_LOAD = 0.25
"""Load average per core, over which the machine is not idle."""
RUNS, SUBSET_RUNS = 5, 3


def main(known: list[Scenario], description: str, *, subset: frozenset[str] = frozenset()) -> int:
    """The exit status. ``subset`` names what ``--subset`` measures. SystemExit for names and paths that do not exist."""
    parser = _parser(description, subset)
    parsed = parser.parse_args()
    if subset and parsed.subset and parsed.names:
        parser.error("--subset is a choice of its own: give names or it, and not both")
    in_short = bool(subset) and parsed.subset
    chosen = [one for one in known if one.name in subset] if in_short else _select(known, parsed.names)
    if parsed.list:
        for scenario in chosen:
            print(f"{scenario.number or '-':4} {scenario.name:15} {scenario.title}")
        return 0
    options = Options(
        1 if parsed.quick else parsed.runs or (SUBSET_RUNS if in_short else RUNS),
        quick=parsed.quick,
        slim_serve=parsed.slim_serve,
        llama_server=parsed.llama_server,
        llama_batched_bench=parsed.llama_batched_bench,
        model=parsed.model,
        gemma=parsed.gemma,
        results=parsed.results.absolute(),
    )
    if not options.quick and os.getloadavg()[0] > IDLE_LOAD * (os.cpu_count() or 1):
        print(f"warning: the load average is {os.getloadavg()[0]:.2f}; something else runs here", file=sys.stderr)
    if not plots.available():
        print(plots.MISSING, file=sys.stderr)
    ended = {scenario.name: execute(scenario, options) for scenario in chosen}
    failed = [name for name, measured in ended.items() if measured is False]
    left_out = [name for name, measured in ended.items() if measured is None]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    if left_out:
        print(f"left out: {', '.join(left_out)}", file=sys.stderr)
    return int(bool(failed or (left_out and parsed.names)))


def _parser(description: str, subset: frozenset[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="scenarios or their numbers; all without any")
    parser.add_argument("--list", action="store_true", help="say what there is, and measure nothing")
    if subset:
        parser.add_argument("--subset", action="store_true", help=f"about five minutes: {', '.join(sorted(subset))}")
    parser.add_argument(
        "--runs", type=_count, help=f"of each side, each with a fresh server ({RUNS}; --subset: {SUBSET_RUNS})"
    )
    parser.add_argument("--quick", action="store_true", help="one tiny run each: do the scripts work?")
    parser.add_argument("--slim-serve", metavar="PATH", help="slim-serve or its virtual environment; none: without it")
    parser.add_argument("--llama-server", metavar="PATH", help="llama-server or its folder; none: without it")
    parser.add_argument("--llama-batched-bench", metavar="PATH", help="the same of llama-batched-bench")
    parser.add_argument("--model", metavar="PATH", default=SMOLLM2, help="of the scenarios with a real model (SmolLM2)")
    parser.add_argument("--gemma", metavar="PATH", help="gemma-3-270m, if not from its package; none: without it")
    parser.add_argument("--results", type=Path, default=HERE / "results", metavar="DIRECTORY")
    return parser


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{count} runs are none")
    return count


def _select(scenarios: list[Scenario], names: list[str]) -> list[Scenario]:
    """By name or number, in the order in which they stand."""
    known = {key: scenario for scenario in scenarios for key in (scenario.name, scenario.number.lower()) if key}
    unknown = [name for name in names if name.lower() not in known]
    if unknown:
        raise SystemExit(f"no such scenario: {', '.join(unknown)}; there are {', '.join(s.name for s in scenarios)}")
    wanted = [known[name.lower()] for name in names]
    return [scenario for scenario in scenarios if scenario in wanted] if names else scenarios


def execute(scenario: Scenario, options: Options) -> bool | None:
    """Measure, write the files, show the table. False: it failed; None: there is nothing to measure it with. Its files
    are then as they were.
    """
    began = time.monotonic()
    environment = machine.environment()
    try:
        found = scenario.measure(options)
    except Missing as missing:
        print(f"{scenario.name}: {missing}", file=sys.stderr)
        return None
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        print(f"{scenario.name}: {error}", file=sys.stderr)
        return False
    made = report.document(scenario, options, environment, found)
    report.write(options.results, made)
    report.show(made)
    print(f"  ({time.monotonic() - began:.0f} s)", flush=True)
    return True
