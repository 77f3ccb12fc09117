"""Plan: what a benchmark sends, how much of it and when; checked once, before anything is sent."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from slimproc.bench.failures import BadPlan

MAX_STREAMS = 20_000
"""More than a client's ports and descriptors allow on most machines."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Times are seconds. Raises BadPlan when it is made and makes no sense."""

    streams: int = 8
    """Requests that are always running (closed loop), unless there is a ``rate``."""
    rate: float | None = None
    """Poisson arrivals a second, whatever the server does (open loop)."""
    requests: int | None = None
    duration: float | None = None
    """No request begins after it."""
    chat: bool = True
    stream: bool = True
    max_tokens: int = 64
    prompt_words: int = 16
    shared_prefix: int = 0
    """Words at the beginning of a prompt that other prompts begin with, too."""
    prefixes: int = 1
    """Different shared beginnings, of which every request takes one at random."""
    cancel: float = 0.0
    """The probability that a client leaves in mid-stream."""
    warmup: int = 0
    """Requests before the clock starts."""
    seed: int = 0
    timeout: float = 300.0
    """For one request, from its intended start."""
    slo_ttft: float | None = None
    slo_itl: float | None = None
    """Of an answer's mean time between tokens."""
    usage: bool = True
    """Ask streams for their usage."""
    fields: dict[str, Any] = field(default_factory=dict)
    """More fields of every body."""

    def __post_init__(self) -> None:
        _between("--streams", self.streams, 1, MAX_STREAMS)
        _between("--max-tokens", self.max_tokens, 1, 10_000_000)
        _between("--prompt-words", self.prompt_words, 0, 1_000_000)
        _between("--shared-prefix", self.shared_prefix, 0, 1_000_000)
        _between("--prefixes", self.prefixes, 1, 1_000_000)
        _between("--warmup", self.warmup, 0, 1_000_000)
        _between("--cancel", self.cancel, 0, 1)
        if self.rate is not None:
            _between("--rate", self.rate, 1e-6, 1e6)
        if self.requests is not None:
            _between("--requests", self.requests, 1, 100_000_000)
        for name, value in (
            ("--duration", self.duration),
            ("--timeout", self.timeout),
            ("--slo-ttft", self.slo_ttft),
            ("--slo-itl", self.slo_itl),
        ):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise BadPlan(f"{name}: a number above 0, not {value:g}")
        if self.cancel and not self.stream:
            raise BadPlan("--cancel: only a streamed answer can be left in its middle")
        if self.prefixes > 1 and not self.shared_prefix:
            raise BadPlan("--prefixes: say with --shared-prefix how many words they have")
        if self.slo_itl is not None and not self.stream:
            raise BadPlan("--slo-itl: an answer that is not streamed has no time between tokens")
        if self.slo_ttft is not None and not self.stream:
            raise BadPlan("--slo-ttft: an answer that is not streamed has no first token")

    @property
    def limit(self) -> int | None:
        """Requests in all; None: as many as its ``duration`` allows."""
        if self.requests is not None:
            return self.requests
        if self.duration is not None:
            return None
        return self.streams * 8 if self.rate is None else math.ceil(self.rate * 10)

    @property
    def route(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"


def _between(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise BadPlan(f"{name}: a number from {least:g} to {most:g}, not {value:g}")
