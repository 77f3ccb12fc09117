"""RestartPermit: whether a replica that backed off may start again within the hold that it kept."""

from __future__ import annotations

from typing import Final

from slimproc import logs
from slimproc.replicas.replica import Replica
from slimproc.residency.ledger import Ledger

log = logs.get("slimproc.residency")

_PATIENCE: Final = 5.0
"""Seconds that a replica in back-off waits for room of its own."""
_MEMORY_TRIES: Final = 1
"""Loads that may fail for want of memory though the numbers said that there is enough; after the next, who waits is told."""


class RestartPermit:
    """One that may not start for a while is stopped: then its model is absent, and who wants it has others make room."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._denied_since: dict[str, float] = {}

    def given(self, replica: Replica, now: float) -> bool:
        """Whether it may start now. Otherwise it is asked again, or has been asked to stop."""
        if out_of_memory(replica):
            replica.ask_stop(0.0)  # those who waited were told; the next request tries again
            return False
        if self._ledger.reload(replica.name, now):
            return True
        if now - self._denied_since.setdefault(replica.name, now) > _PATIENCE:
            log.warning("there is no room for a restart", replica=replica.name, device=replica.device)
            replica.ask_stop(0.0)
        return False

    def forget(self, name: str) -> None:
        """It does not back off any more."""
        self._denied_since.pop(name, None)


def out_of_memory(replica: Replica) -> bool:
    """It did not get the memory that it needs, also not from a second try."""
    return replica.short_of_memory > _MEMORY_TRIES
