"""What planning tells people: one sentence for each outcome, with the numbers that it was decided by."""

from __future__ import annotations

from collections.abc import Sequence

from slimproc.residency.room import Place, Room
from slimproc.residency.views import Explanation, Phase, UnitView, Verdict


def size(count: int) -> str:
    """Bytes as people read them."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(count) >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count} bytes"


def names(units: Sequence[UnitView]) -> str:
    return ", ".join(unit.name for unit in units)


class Reasons:
    """Builds explanations. They tell the accounts as they are at that moment: ask before bytes are taken."""

    def __init__(self, room: Room) -> None:
        self._room = room

    def plain(self, model: str, verdict: Verdict, reason: str) -> Explanation:
        return Explanation(model=model, verdict=verdict, reason=reason)

    def held(self, unit: UnitView, verdict: Verdict, reason: str) -> Explanation:
        """Of a unit that has its bytes."""
        view = self._room.devices.get(unit.device) if unit.device is not None else None
        return Explanation(
            model=unit.model,
            verdict=verdict,
            reason=reason,
            device=unit.device,
            needed=unit.hold,
            available=view.available if view is not None else 0,
            total=view.total if view is not None else 0,
        )

    def at(self, place: Place, verdict: Verdict, reason: str, victims: Sequence[UnitView] = ()) -> Explanation:
        """Of a unit that wants to be somewhere."""
        account = self._room.now[self._room.pool(place.device)]
        return Explanation(
            model=place.unit.model,
            verdict=verdict,
            reason=reason,
            device=place.device,
            needed=self._room.need(account, place.unit, place.device),
            available=account.bytes,
            total=self._room.devices[place.device].total,
            victims=tuple(victim.name for victim in victims),
        )

    def numbers(self, place: Place) -> str:
        account = self._room.now[self._room.pool(place.device)]
        needed = self._room.need(account, place.unit, place.device)
        available = size(max(0, account.bytes))
        return f"{place.unit.model} needs {size(needed)} on {place.device}, where {available} can be had"

    def too_large(self, place: Place) -> str:
        total, limit = self._room.devices[place.device].total, self._room.limit(place.device)
        needed = place.unit.claim.peak + place.unit.claim.file_bytes
        most = f"{size(limit)} of its {size(total)}"
        return f"{place.unit.model} needs {size(needed)}, and {place.device} can give at most {most}"

    def hopeless(self, place: Place, stuck: Sequence[UnitView], missing: int) -> str:
        """It would not fit even if everything evictable went."""
        causes = []
        external = self._room.devices[place.device].external
        if external:
            causes.append(f"other processes have at least {size(external)}")
        for what, found in (
            ("pinned", [each for each in stuck if each.pinned]),
            ("of unknown state", [each for each in stuck if each.phase in (Phase.UNKNOWN, Phase.FAILED)]),
        ):
            if found:
                causes.append(f"{what}: {names(found)}")
        because = f" ({'; '.join(causes)})" if causes else ""
        return f"{self.numbers(place)}; {size(missing)} would be missing if all went that may go{because}"
