"""Faults of GPUs and of their driver: what they are called, and what is said to people."""

from __future__ import annotations

from typing import Final

LOST: Final = "lost"
"""The GPU has fallen off the bus; what ran there is of no more use."""
MISMATCH: Final = "driver_mismatch"
UNKNOWN: Final = "unknown"
"""Begins every other fault; the driver's own words follow."""
KINDS: Final = (LOST, MISMATCH, UNKNOWN)
DRIVER: Final = "driver"
"""What stands in the place of a device where the driver as a whole has a fault."""

_IN_WORDS: Final = {
    LOST: "the GPU is lost (a reset of the GPU, or a reboot, is what brings it back)",
    MISMATCH: "driver_mismatch: the NVIDIA library does not fit the driver that is loaded; "
    "this is so after an upgrade of the driver, until a reboot",
}


def kind_of(fault: str) -> str:
    """The one of KINDS that a fault is of."""
    return next((each for each in KINDS if fault == each), UNKNOWN)


def in_words(fault: str) -> str:
    """A fault as people are told of it."""
    return _IN_WORDS.get(fault, fault)
