"""Unit: one replica with what residency remembers of it, and how it looks to planning."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from slimproc.config import ModelConfig
from slimproc.replicas.replica import Replica
from slimproc.replicas.restart import RETRY_AFTER
from slimproc.replicas.states import ReplicaState
from slimproc.residency.views import Claim, Phase, UnitView

_PHASES: Final = {
    ReplicaState.STOPPED: Phase.ABSENT,
    ReplicaState.STARTING: Phase.LOADING,
    ReplicaState.READY: Phase.RESIDENT,
    ReplicaState.DRAINING: Phase.DRAINING,
    ReplicaState.STOPPING: Phase.LEAVING,
    ReplicaState.KILLING: Phase.LOADING,
    ReplicaState.BACKOFF: Phase.LOADING,
    ReplicaState.FAILED: Phase.FAILED,
}
_ASKED: Final = {
    "start": (Phase.ABSENT, Phase.FAILED, Phase.UNKNOWN),
    "stop": (Phase.RESIDENT, Phase.LOADING),
    "abandon": (Phase.DRAINING,),
}
_THEN: Final = {"start": Phase.LOADING, "stop": Phase.DRAINING, "abandon": Phase.RESIDENT}


class Unit:
    """``asked``: what its owner has been asked and has not done yet, so that nobody asks twice."""

    def __init__(self, replica: Replica, config: ModelConfig, make_claim: Callable[[], Claim]) -> None:
        self.replica = replica
        self.config = config
        self.claim = make_claim()
        self.devices: tuple[str, ...] = ()
        """Where it may be, best first; empty until it is known what there is."""
        self.device: str | None = None
        self.asked = ""
        self.drained_for: str | None = None
        self.drain_began = 0.0
        self.expired = False
        self.state = replica.state
        """As it was when residency last heard of it."""
        self.retired = False
        """It is stopping for good: its model has other replicas by now, or is no longer configured."""
        self.forgiven = False
        """An operator wants it tried again, however short a time ago it was given up."""
        self.unwanted = False
        """Whoever it was loaded for has left before it was."""
        self._make_claim = make_claim

    def __repr__(self) -> str:
        return f"<Unit {self.name} {self.phase.value} on {self.device}>"

    @property
    def name(self) -> str:
        return self.replica.name

    @property
    def model(self) -> str:
        """Whose wishes it is for: nobody's once it is retired."""
        return self.config.name if not self.retired else f"{self.config.name}, as it was"

    def renew_claim(self) -> None:
        """Ask again what it will need: its file may have come or changed, or it was measured meanwhile."""
        self.claim = self._make_claim()

    # --- what its owner is asked --------------------------------------------------------------------------------------

    def start(self) -> None:
        self.asked = "start"
        self.replica.ask_start(device=self.device)

    def evict(self, model: str, drain_limit: float, now: float) -> None:
        """It drains and goes to make room for ``model``; a drain that takes longer than ``drain_limit`` is given up."""
        self.drained_for, self.expired, self.drain_began = model, False, now
        self.asked = "stop"
        self.replica.ask_stop(drain_limit, abandon=True)

    def expire(self, drain_limit: float) -> None:
        """It goes, for nobody wants it; unless somebody does before it is drained."""
        self.asked, self.expired = "stop", True
        self.replica.ask_stop(drain_limit, abandon=True)

    def abandon_drain(self) -> None:
        """It serves on."""
        self.asked = "abandon"
        self.replica.abandon_drain()

    def unload(self, drain_limit: float) -> None:
        """An operator wants it out: what is not done by the limit is ended."""
        self._stops()
        self.forgiven = False
        self.replica.ask_stop(drain_limit)

    def retire(self) -> None:
        """It is being stopped for good, so that nobody's wishes are for it."""
        self.retired = True
        self._stops()

    def _stops(self) -> None:
        """It is stopped for nobody's sake. A start that was asked before is heard before, and ends in this stop."""
        self.drained_for, self.expired = None, False
        if self.asked != "start":
            self.asked = "stop"

    # --- how it is seen -----------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        phase = Phase.LEAVING if self.replica.stuck else _PHASES[self.replica.state]
        if phase in (Phase.ABSENT, Phase.FAILED) and self.replica.remains:
            phase = Phase.UNKNOWN
        elif phase is Phase.FAILED and not self._given_up:
            phase = Phase.ABSENT
        if self.asked and phase in _ASKED[self.asked]:
            return _THEN[self.asked]
        return phase

    @property
    def _given_up(self) -> bool:
        """It has failed, and is not to be tried again yet."""
        replica = self.replica
        failed = replica.state is ReplicaState.FAILED and not self.forgiven
        return failed and time.monotonic() - replica.changed_at < RETRY_AFTER and not replica.renewed

    @property
    def _never_used(self) -> bool:
        """It is in memory for nobody, so that its going cannot make anybody load it again soon."""
        replica = self.replica
        return self.unwanted and not replica.occupied and replica.idle_since <= replica.resident_since

    def view(self, hold: int, attributed: int) -> UnitView:
        replica, config = self.replica, self.config
        phase = self.phase
        return UnitView(
            name=self.name,
            model=self.model,
            phase=phase,
            claim=self.claim,
            # Of a server that may still have its model, nobody knows better than that it is where it was.
            devices=(self.device,) if phase is Phase.UNKNOWN and self.device is not None else self.devices,
            device=self.device,
            hold=hold,
            attributed=attributed,
            busy=replica.occupied,
            pinned=config.pin and not self.retired,
            resident_since=replica.resident_since,
            idle_since=replica.idle_since,
            min_resident=0.0 if self._never_used else config.min_resident,
            ttl=None if self.retired else config.ttl,
            drained_for=self.drained_for,
            expired=self.expired,
            asked=replica.sighting is None or replica.sighting.asked,
            failed=self._given_up and self.asked != "start",
            backing_off=replica.state is ReplicaState.BACKOFF,
            killed=bool(replica.stuck),
            note=replica.unload_failed if phase is Phase.LEAVING else replica.reason,
        )
