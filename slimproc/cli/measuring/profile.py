"""What was measured, as a ``memory:`` block: the worst of all rounds, with headroom on the peaks."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from slimproc import __version__
from slimproc.cli.info import hardware
from slimproc.cli.measuring.asked import Asked
from slimproc.cli.measuring.meter import Peak
from slimproc.config import MemoryProfile
from slimproc.residency.views import HOST

KEYS = ("load_peak", "inference_peak", "residual", "max_concurrency", "profile_id")
_LONGEST = 100
"""Characters of a piece of hardware's name."""


@dataclass(frozen=True)
class Round:
    """Bytes."""

    number: int
    load: Peak
    run: Peak
    residual: int


@dataclass(frozen=True)
class Measured:
    """``device``: where; ``hardware``: what that is, for people. ``file``: a mapped one that counts once for all, or None."""

    rounds: Sequence[Round]
    device: str
    hardware: str
    concurrency: int
    file: str | None = None
    file_bytes: int = 0

    @property
    def whole(self) -> bool:
        """Of a device whose bytes could not be told apart."""
        return any(one.load.whole or one.run.whole for one in self.rounds)


def profile(measured: Measured, asked: Asked) -> MemoryProfile:
    load_peak = asked.roomy(max(one.load.bytes for one in measured.rounds))
    inference_peak = asked.roomy(max(one.run.bytes for one in measured.rounds))
    residual = max(one.residual for one in measured.rounds)
    return MemoryProfile(
        load_peak=load_peak,
        inference_peak=inference_peak,
        residual=min(residual, max(load_peak, inference_peak)),
        max_concurrency=measured.concurrency,
        profile_id=f"{time.strftime('%Y-%m-%d')} {measured.hardware}, slimproc {__version__}",
    )


def hardware_name(device: str, name: str) -> str:
    """What a device is, in characters that a configuration may have."""
    text = str(hardware()["cpu"]) if device == HOST else name
    return "".join(c if c.isprintable() else "?" for c in text)[:_LONGEST].strip() or device


def entries(memory: MemoryProfile) -> dict[str, str]:
    """Keys and values as YAML has them."""
    values = msgspec.structs.asdict(memory)
    return {
        key: json.dumps(values[key], ensure_ascii=False) if isinstance(values[key], str) else str(values[key])
        for key in KEYS
    }


def block(memory: MemoryProfile, indent: int) -> list[str]:
    """The lines of the block, without line ends, the first of which begins after ``indent`` spaces."""
    inside = [f"{' ' * (indent + 2)}{key}: {value}" for key, value in entries(memory).items()]
    return [f"{' ' * indent}memory:", *inside]
