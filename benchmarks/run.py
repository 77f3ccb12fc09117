"""Runs the benchmarks and writes what they found.

    python benchmarks/run.py [--list] [--subset | NAME ...] [--runs 5] [--quick] [--slim-serve PATH]
        [--llama-server PATH] [--llama-batched-bench PATH] [--model PATH] [--gemma PATH] [--results DIRECTORY]

Names are those of --list, or the numbers of the targets (S1 ...). --subset is what fits into about five minutes. Run it
on an otherwise idle machine; it warns if it is not. How long each scenario takes is in benchmarks/README.md.
"""

from __future__ import annotations

import sys

import engines
import faults
import gemma
import long_prompts
import many_streams
import overhead
import overload
import passing
import prefill
import prefix
import queueing
import recovery
import replicas
import ring_scenario
import serving
import startup
import steps
import swapping
from command import main

SCENARIOS = [
    *ring_scenario.SCENARIOS,
    *serving.SCENARIOS,
    *engines.SCENARIOS,
    *steps.SCENARIOS,
    *prefix.SCENARIOS,
    *overload.SCENARIOS,
    *many_streams.SCENARIOS,
    *startup.SCENARIOS,
    *recovery.SCENARIOS,
    *prefill.SCENARIOS,
    *swapping.SCENARIOS,
    *passing.SCENARIOS,
    *faults.SCENARIOS,
    *overhead.SCENARIOS,
    *queueing.SCENARIOS,
    *long_prompts.SCENARIOS,
    *replicas.SCENARIOS,
    *gemma.SCENARIOS,
]
SUBSET = frozenset({"ring", "slim-serve", "joined-writes", "start", "recovery", "overhead"})
"""What says most of each part in five minutes with three runs: the ring, the whole stack, one request, the start, a death."""

if __name__ == "__main__":
    sys.exit(main(SCENARIOS, __doc__ or "", subset=SUBSET))
