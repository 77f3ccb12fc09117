"""Who goes to make room: as many bytes as are needed and no more, least recently used first. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from slimproc.residency.room import Room
from slimproc.residency.views import Phase, UnitView


@dataclass(frozen=True)
class Candidate:
    """A unit that may go; ``ready``: it may be asked to now, rather than after its load, ``min_resident`` or an older
    demand for its own model.
    """

    unit: UnitView
    ready: bool


@dataclass(frozen=True)
class Choice:
    """``ready``: all victims may go now."""

    device: str
    victims: Sequence[UnitView]
    ready: bool
    new: int
    """How many of them are not draining yet."""

    @property
    def cost(self) -> tuple[bool, int, float]:
        """Least first: no waiting, few new victims, and those that were not used for long."""
        last = max(
            (unit.idle_since for unit in self.victims if unit.phase is not Phase.DRAINING), default=float("-inf")
        )
        return (not self.ready, self.new, last)


def candidates(
    units: Sequence[UnitView], model: str, now: float, *, taken: Collection[str], older: Collection[str]
) -> list[Candidate]:
    """Those of ``units`` that may go for ``model``, best first. ``taken``: by older demands; ``older``: their models."""
    found = [
        Candidate(unit, _ready(unit, now) and unit.model not in older)
        for unit in units
        if unit.name not in taken and unit.model != model and _evictable(unit)
    ]
    return sorted(found, key=lambda each: (not each.ready, *_last_use(each.unit, model, now), each.unit.name))


def _evictable(unit: UnitView) -> bool:
    """Now or later; not what is pinned, nor what is on its way out without us."""
    if unit.phase is Phase.DRAINING:
        return unit.drained_for is not None or unit.expired
    return unit.phase in (Phase.RESIDENT, Phase.LOADING) and not unit.pinned


def _ready(unit: UnitView, now: float) -> bool:
    if unit.phase is Phase.LOADING:
        return unit.backing_off
    return unit.phase is Phase.DRAINING or now >= unit.resident_since + unit.min_resident


def _last_use(unit: UnitView, model: str, now: float) -> tuple[int, float]:
    if unit.phase is Phase.DRAINING:
        return (0 if unit.drained_for == model else 1, 0.0)
    if unit.backing_off:
        return (2, 0.0)
    return (3, now if unit.busy or unit.phase is Phase.LOADING else unit.idle_since)


def choose(room: Room, unit: UnitView, device: str, offered: Sequence[Candidate]) -> Choice | None:
    """The victims that make the unit fit on the device, beside everything that is promised there; None: there are none."""
    ready = [each for each in offered if each.ready]
    for among in (ready, offered):
        chosen = _fewest(room, unit, device, among)
        if chosen is not None:
            victims = [each.unit for each in chosen]
            new = sum(victim.phase is not Phase.DRAINING for victim in victims)
            return Choice(device, victims, all(each.ready for each in chosen), new)
    return None


def _fewest(room: Room, unit: UnitView, device: str, among: Sequence[Candidate]) -> list[Candidate] | None:
    account = room.later[room.pool(device)]

    def enough(chosen: Sequence[Candidate]) -> bool:
        return room.short(account, unit, device, [each.unit for each in chosen], hopeful=True) <= 0

    if not enough(among):
        return None
    # More victims never make less room, so the shortest list that is enough is found by halving.
    count = bisect_left(range(len(among) + 1), 1, key=lambda length: enough(among[:length]))
    chosen = list(among[:count])
    for each in reversed(among[:count]):
        rest = [other for other in chosen if other is not each]
        if enough(rest):
            chosen = rest
    return chosen
