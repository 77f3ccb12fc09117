"""What admission has let in, whatever it is for: the part of a request that the queues and the controller know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from slimproc.admission.queue import Waiting
from slimproc.errors import SlimprocError
from slimproc.replicas.life import AnySlot
from slimproc.request import Deadline


@dataclass
class Timeline:
    """Monotonic instants in seconds; 0: not yet."""

    arrived: float
    ready: float = 0.0
    """Its model could serve: when it arrived, or later, after a load."""
    granted: float = 0.0
    first_text: float = 0.0
    last_text: float = 0.0
    ended: float = 0.0


class Asked(Protocol):
    """What somebody asked for."""

    @property
    def id(self) -> str: ...
    @property
    def model(self) -> str:
        """The configured name."""

    @property
    def deadline(self) -> Deadline: ...
    @property
    def queue_deadline(self) -> Deadline:
        """It has its first slot by then, or it is told that it waited too long."""


class Admitted(Waiting, Protocol):
    """A ``Generation`` or a ``Passage``. It ends exactly once; ``outcome`` is empty until then."""

    @property
    def request(self) -> Asked: ...
    @property
    def avoids(self) -> str:
        """The replica that it could not reach and will not be handed again; empty: none."""

    times: Timeline
    outcome: str
    error: SlimprocError | None
    engine_name: str

    def grant(self, slot: AnySlot) -> None:
        """A slot of the kind that the model's replicas have."""

    def fail(self, error: SlimprocError) -> None: ...
    def expire(self) -> None:
        """Its time is over: the deadline's, or the queue's."""


OUTCOMES = {
    "timeout": "timeout",
    "shutting_down": "shutdown",
    "engine_crashed": "engine_crashed",
    "service_unavailable": "unavailable",
    "insufficient_memory": "unavailable",
    "invalid_request_error": "invalid",
    "context_length_exceeded": "invalid",
    "body_too_large": "invalid",
    "request_timeout": "invalid",
}
"""The outcome of a request that ended by an error of this code; of any other code it is ``engine_error``."""
REFUSALS = frozenset({"unavailable", "invalid"})
"""Outcomes that are refusals, if late ones: they count as rejected, as every refused request does."""


LONGEST_TIMER = 1e9
"""Seconds. What lies further ahead never comes, and no loop counts so far."""


def next_deadline(asked: Asked, *, started: bool) -> float:
    """The next instant (monotonic) at which the request's time is over; infinite where it has none."""
    return asked.deadline.at if started else min(asked.deadline.at, asked.queue_deadline.at)
