"""Which models are wanted: what residency plans from. Somebody waits for them, or asked and was not allowed to wait."""

from __future__ import annotations

from collections.abc import Mapping

from slimproc.admission.admitted import Admitted
from slimproc.admission.queue import RequestQueue
from slimproc.residency.views import Demand

ASKED_LASTS = 30.0
"""Seconds for which a model is wanted after somebody asked for it and was refused: they come back within 5."""

Queues = Mapping[str, RequestQueue[Admitted]]


class DemandBook:
    """The queues seen as demands, and whether what is seen has changed in a way that residency cares about."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._asked: dict[str, tuple[float, float]] = {}
        """By model: when somebody first asked and was refused, and when somebody last did."""
        self._told: dict[str, float | None] = dict.fromkeys(queues)

    def ask(self, model: str, now: float) -> None:
        """Somebody asked for a model that is not there, and may not wait for it."""
        first, _ = self._asked.get(model, (now, now))
        self._asked[model] = (first, now)

    def forget(self, model: str) -> None:
        """The model serves, or cannot be had: those who asked and do not wait are owed nothing more."""
        self._asked.pop(model, None)

    def demands(self, now: float) -> list[Demand]:
        """One for every model that is wanted."""
        self._asked = {model: asked for model, asked in self._asked.items() if now - asked[1] < ASKED_LASTS}
        found = []
        for model, queue in self._queues.items():
            head = queue.head()
            if head is not None:
                found.append(Demand(model, since=head.arrived, waiting=queue.requests))
            elif model in self._asked:
                found.append(Demand(model, since=self._asked[model][0], waiting=0))
        return found

    def changed(self, model: str, *, served: bool) -> bool:
        """Whether residency is to hear of the model's queue: it is empty, or no more; or, while nobody serves it,
        somebody else waits there for the longest.
        """
        head = self._queues[model].head()
        now, before = None if head is None else head.arrived, self._told.get(model)
        self._told[model] = now
        return (now is None) != (before is None) or (now != before and not served)
