"""Runs the benchmarks and writes what they found.

    python benchmarks/run.py [--list] [NAME ...] [--runs 5] [--quick] [--slim-serve PATH]
        [--llama-server PATH] [--llama-batched-bench PATH] [--model PATH] [--results DIRECTORY]

Names are those of --list, or the numbers of the targets (S1 ...). Run it on an otherwise idle machine; it warns if it is
not. S1 to S4 and S12 take about 10 minutes with 5 runs; the others, which compute with a real model, can take three times
that on two slow cores.
"""

from __future__ import annotations

import sys

import engines
import faults
import overload
import passing
import prefill
import prefix
import recovery
import ring_scenario
import serving
import startup
import swapping
from command import main

SCENARIOS = [
    *ring_scenario.SCENARIOS,
    *serving.SCENARIOS,
    *engines.SCENARIOS,
    *prefix.SCENARIOS,
    *overload.SCENARIOS,
    *startup.SCENARIOS,
    *recovery.SCENARIOS,
    *prefill.SCENARIOS,
    *swapping.SCENARIOS,
    *passing.SCENARIOS,
    *faults.SCENARIOS,
]

if __name__ == "__main__":
    sys.exit(main(SCENARIOS, __doc__ or ""))
