"""Draft: a plan in the making. The rooms that plan share it, and write down in it what they have decided."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field

from slimproc.residency.reasons import Reasons
from slimproc.residency.room import Place, Room
from slimproc.residency.views import Action, Evict, Explanation, Load, Phase, Refuse, RefuseCode, UnitView, World


@dataclass
class Draft:
    world: World
    room: Room = field(init=False)
    reasons: Reasons = field(init=False)
    actions: list[Action] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)
    """Units about which something was decided already: nobody younger may count on them."""
    older: set[str] = field(default_factory=set)
    """The models of the requests' demands that were looked at already: theirs may not be evicted yet."""

    waited_for: dict[str, str] = field(default_factory=dict)
    """Pools of memory that an older demand waits for, and its model. Nobody younger is loaded there: whatever it took, and
    however much of it seems to be left over now, the older one might have had it sooner than what it waits for.
    """

    def __post_init__(self) -> None:
        self.room = Room(self.world)
        self.reasons = Reasons(self.room)

    def load(self, place: Place) -> None:
        self.actions.append(Load(place.unit.name, place.device, place.unit.claim.peak))
        self.taken.add(place.unit.name)
        self.room.take(place.unit, place.device)

    def evict(self, victims: Iterable[UnitView], model: str) -> None:
        self.actions += [Evict(each.name, by=model) for each in victims if each.phase is not Phase.DRAINING]

    def promise(self, place: Place, victims: Iterable[UnitView]) -> None:
        """The bytes of the victims are for the unit: nobody younger gets them."""
        going = list(victims)
        self.taken.update(each.name for each in going)
        self.room.release(going)
        self.room.reserve(place.unit, place.device)

    def wait_for(self, model: str, devices: Iterable[str]) -> None:
        """The model waits for memory on one of the devices."""
        for device in devices:
            self.waited_for.setdefault(self.room.pool(device), model)

    def older_waiter(self, device: str) -> str | None:
        """The model that waits for memory there, and was asked for before."""
        return self.waited_for.get(self.room.pool(device))

    def refuse(self, code: RefuseCode, explanation: Explanation) -> Explanation:
        refused = dataclasses.replace(explanation, code=code)
        self.actions.append(Refuse(refused.model, code, refused))
        return refused
