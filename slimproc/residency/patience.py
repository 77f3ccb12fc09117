"""Patience: how long who waits for a sample of a device's memory may wait for one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from slimproc.residency.views import Demand, Plan, World

SHORTEST: Final = 4.0
"""Seconds. However old a sample may be: so long it takes at most until there is one though a probe has failed (3 s of
silence, then one of the front's own), and between two is up to a second while nobody asks.
"""


class Patience:
    """Remembers since when each device has had no fresh sample. ``limit``: seconds, of which there are at least SHORTEST."""

    def __init__(self, limit: float) -> None:
        self.set_limit(limit)
        self._since: dict[str, float] = {}

    def set_limit(self, limit: float) -> None:
        self._limit = max(SHORTEST, limit)

    def look(self, plan: Plan, world: World) -> tuple[list[Demand], float | None]:
        """The demands whose time is over, and the instant at which the next one's is."""
        self._note(world)
        over: list[Demand] = []
        next_at: float | None = None
        for demand in world.demands:
            explanation = plan.explanations.get(demand.model)
            if explanation is None or explanation.verdict != "wait" or not demand.waiting:
                continue
            devices = {device for unit in world.units if unit.model == demand.model for device in unit.devices}
            if any(device in world.devices and world.devices[device].fresh for device in devices):
                continue  # it waits for something else
            at = max(demand.since, self._unfresh_since(devices, demand.since)) + self._limit
            if at <= world.now:
                over.append(demand)
            elif next_at is None or at < next_at:
                next_at = at
        return over, next_at

    def _note(self, world: World) -> None:
        fresh = {name for name, device in world.devices.items() if device.fresh}
        self._since = {name: at for name, at in self._since.items() if name in world.devices and name not in fresh}
        for name in world.devices.keys() - fresh:
            self._since.setdefault(name, world.now)

    def _unfresh_since(self, devices: Iterable[str], otherwise: float) -> float:
        return min((self._since.get(device, otherwise) for device in devices), default=otherwise)
