"""The command line of every script that measures: which scenarios, how often, and where the results go."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import machine
import report
from scenario import HERE, SMOLLM2, Options, Scenario

IDLE_LOAD = 0.25
"""Load average per core, over which the machine is not idle."""


def main(known: list[Scenario], description: str) -> int:
    """The exit status. SystemExit for names and paths that do not exist."""
    parsed = _parser(description).parse_args()
    chosen = _select(known, parsed.names)
    if parsed.list:
        for scenario in chosen:
            print(f"{scenario.number:4} {scenario.name:14} {scenario.title}")
        return 0
    options = Options(
        1 if parsed.quick else parsed.runs,
        quick=parsed.quick,
        slim_serve=parsed.slim_serve,
        llama_server=parsed.llama_server,
        llama_batched_bench=parsed.llama_batched_bench,
        model=parsed.model,
        results=parsed.results.absolute(),
    )
    if not options.quick and os.getloadavg()[0] > IDLE_LOAD * (os.cpu_count() or 1):
        print(f"warning: the load average is {os.getloadavg()[0]:.2f}; something else runs here", file=sys.stderr)
    failed = [scenario.name for scenario in chosen if not execute(scenario, options)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed) > 0


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="scenarios or their numbers; all without any")
    parser.add_argument("--list", action="store_true", help="say what there is, and measure nothing")
    parser.add_argument("--runs", type=int, default=5, help="of each side, each with a fresh server (5)")
    parser.add_argument("--quick", action="store_true", help="one tiny run each: do the scripts work?")
    parser.add_argument("--slim-serve", metavar="PATH", help="slim-serve or its virtual environment; none: without it")
    parser.add_argument("--llama-server", metavar="PATH", help="llama-server or its folder; none: without it")
    parser.add_argument("--llama-batched-bench", metavar="PATH", help="the same of llama-batched-bench")
    parser.add_argument("--model", metavar="PATH", default=SMOLLM2, help="of S5 to S8, S11 and S13 (SmolLM2)")
    parser.add_argument("--results", type=Path, default=HERE / "results", metavar="DIRECTORY")
    return parser


def _select(scenarios: list[Scenario], names: list[str]) -> list[Scenario]:
    """By name or number, in the order in which they stand."""
    known = {key: scenario for scenario in scenarios for key in (scenario.name, scenario.number.lower())}
    unknown = [name for name in names if name.lower() not in known]
    if unknown:
        raise SystemExit(f"no such scenario: {', '.join(unknown)}; there are {', '.join(s.name for s in scenarios)}")
    wanted = [known[name.lower()] for name in names]
    return [scenario for scenario in scenarios if scenario in wanted] if names else scenarios


def execute(scenario: Scenario, options: Options) -> bool:
    """Measure, write the files, show the table. False: it failed, and its files are as they were."""
    began = time.monotonic()
    environment = machine.environment()
    try:
        found = scenario.measure(options)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        print(f"{scenario.name}: {error}", file=sys.stderr)
        return False
    made = report.document(scenario, options, environment, found)
    report.write(options.results, made)
    report.show(made)
    print(f"  ({time.monotonic() - began:.0f} s)", flush=True)
    return True
