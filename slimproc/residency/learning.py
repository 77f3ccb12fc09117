"""Learning: what models in memory were seen to need is kept now and then, and when they leave."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from slimproc.replicas.states import ReplicaState
from slimproc.residency.ledger import Ledger
from slimproc.residency.unit import Unit
from slimproc.residency.views import Claim

_EVERY: Final = 30.0
"""Seconds between two looks at a model that stays in memory."""


class Learning:
    """``keep`` keeps what a unit's model was seen to need."""

    def __init__(self, ledger: Ledger, keep: Callable[[Unit, Claim], None]) -> None:
        self._ledger = ledger
        self._keep = keep
        self._learnt_at: dict[str, float] = {}

    def look(self, units: Iterable[Unit], now: float) -> None:
        for unit in units:
            if unit.state is ReplicaState.READY and now - self._learnt_at.setdefault(unit.name, now) >= _EVERY:
                self.learn(unit, now)

    def learn(self, unit: Unit, now: float) -> None:
        self._learnt_at[unit.name] = now
        seen = self._ledger.seen(unit.name)
        if seen is not None:
            self._keep(unit, seen)

    def forget(self, name: str) -> None:
        self._learnt_at.pop(name, None)
