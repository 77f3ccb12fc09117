"""What the routes ask of residency: which devices there are, what is held, and to have models loaded and unloaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slimproc.replicas.states import ReplicaState
from slimproc.replicas.supervisor import Supervisor
from slimproc.residency.views import DeviceReport, Explanation


class Residency(Protocol):
    """Everything returns at once. A model is called by its configured name."""

    def devices(self) -> Sequence[DeviceReport]: ...
    def held(self, model: str) -> int:
        """Bytes that are kept for it."""

    def preloading(self, model: str) -> bool:
        """It is to be loaded at the start, and has not been yet."""

    def obstacle(self, model: str) -> str:
        """Why it can be loaded nowhere, by the word of the devices and their driver; empty: it may be."""

    @property
    def driver_fault(self) -> str:
        """What is wrong with the GPUs' driver as a whole; empty: nothing."""

    def explain(self, model: str) -> Explanation:
        """What would happen, or does, if somebody asked for it now."""

    def load(self, model: str) -> None:
        """An operator wants it in memory; earlier failures do not count."""

    def unload(self, model: str) -> None:
        """An operator wants it out: what it has to do may take ``drain_timeout``."""


class EverythingFits:
    """For a server without a memory budget: every model is started at the start, and stays."""

    def __init__(self, supervisor: Supervisor, drain_timeout: float) -> None:
        self._supervisor = supervisor
        self._drain_timeout = drain_timeout

    def devices(self) -> Sequence[DeviceReport]:
        return ()

    def held(self, model: str) -> int:  # noqa: ARG002 - of no model
        return 0

    def preloading(self, model: str) -> bool:  # noqa: ARG002 - every one
        return True

    def obstacle(self, model: str) -> str:  # noqa: ARG002 - nobody looks
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
