"""What is judged and what comes of it: the records of both sides as values, and violations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Violation:
    """``rule``: which promise was broken. ``at``: seconds since the run began. ``log``: what the server wrote about it."""

    rule: str
    what: str
    request: str = ""
    at: float = 0.0
    log: tuple[str, ...] = ()


@dataclass
class Told:
    """One request as its client knows it. ``end``: ``ok``, ``error``, ``left`` or ``broken`` (which is a violation, or
    follows from reading too slowly).
    """

    request: str
    model: str
    end: str
    code: str = ""
    status: int = 0
    sent: float = 0.0
    ended: float = 0.0


@dataclass
class Sight:
    """The server seen from outside, at one moment. Bytes and counts; ``metrics`` by name and labels."""

    descriptors: int = 0
    threads: int = 0
    resident: int = 0
    children: Mapping[int, str] = field(default_factory=dict)
    """What kind of process each is."""
    metrics: Mapping[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)
    reserved: Mapping[str, int] = field(default_factory=dict)
    """Bytes that are kept for each model."""
    states: Sequence[tuple[str, str]] = ()
    """Each replica's model and state."""

    def sum(self, name: str, **labels: str) -> float:
        """Over every series of this name (without prefix) that has the labels."""
        wanted = set(labels.items())
        return sum(value for (found, having), value in self.metrics.items() if found == name and wanted <= set(having))


Line = Mapping[str, Any]
"""One line of the server's log."""
