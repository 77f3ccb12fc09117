"""A residency for servers with room for everything."""

from __future__ import annotations

from collections.abc import Sequence

from slimproc.replicas.states import ReplicaState
from slimproc.replicas.supervisor import Supervisor
from slimproc.residency.views import DeviceReport, Explanation


class EverythingFits:
    """A ``Residency`` without a budget."""

    def __init__(self, supervisor: Supervisor, drain_timeout: float) -> None:
        self._supervisor = supervisor
        self._drain_timeout = drain_timeout

    def devices(self) -> Sequence[DeviceReport]:
        return ()

    def held(self, model: str) -> int:
        return 0

    def preloading(self, model: str) -> bool:
        return True

    def obstacle(self, model: str) -> str:
        return ""

    @property
    def driver_fault(self) -> str:
        return ""

    def explain(self, model: str) -> Explanation:
        states = {replica.state for replica in self._supervisor.of(model)}
        if ReplicaState.READY in states:
            return Explanation(model, "resident", "it is in memory")
        if ReplicaState.STARTING in states:
            return Explanation(model, "loading", "it is being loaded")
        return Explanation(model, "load", "it would be loaded: there is no memory budget")

    def load(self, model: str) -> None:
        for replica in self._supervisor.of(model):
            replica.ask_start(forgive=True)

    def unload(self, model: str) -> None:
        for replica in self._supervisor.of(model):
            replica.ask_stop(self._drain_timeout)
