"""What keeps a unit off a device for now or for good, and how that is told to those who wait for it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slimproc.residency.draft import Draft
from slimproc.residency.probes.faults import in_words
from slimproc.residency.room import HOLDING, Place, Room
from slimproc.residency.views import Demand, Explanation, Phase, UnitView


def fault(room: Room, device: str) -> str:
    view = room.devices.get(device)
    return "it is not there" if view is None else in_words(view.fault)


def too_large(room: Room, place: Place) -> bool:
    claim = place.unit.claim
    return claim.peak + claim.file_bytes > room.limit(place.device)


def blocker(draft: Draft, place: Place) -> UnitView | None:
    """A unit beside which nothing may be loaded: its unload failed, or nobody knows what it has. One that has not been
    asked yet comes last, since it may be none in a moment.

    An unknown unit is not kept off by other unknown ones: if none of several servers is up yet, each must be asked for
    once before anybody can know.
    """
    return min(_blockers(draft, place), key=lambda each: not each.asked, default=None)


def _blockers(draft: Draft, place: Place) -> Iterator[UnitView]:
    room, pool = draft.room, draft.room.pool(place.device)
    for other in draft.world.units:
        stuck = other.phase is Phase.LEAVING and other.note and not other.killed
        unknown = other.phase is Phase.UNKNOWN and not other.hold and place.unit.phase is not Phase.UNKNOWN
        if not (stuck or unknown) or other.name == place.unit.name:
            continue
        where = (other.device,) if other.device is not None else other.devices
        if any(room.pool(device) == pool for device in where):
            yield other


def missing(draft: Draft, place: Place) -> int:
    """Bytes that would be missing even if everybody went who may go, now or later; 0 or less if it would fit."""
    everybody = [each for each in draft.room.holders(place.device) if _may_go(each)]
    start = draft.room.start[draft.room.pool(place.device)]
    return draft.room.short(start, place.unit, place.device, everybody, hopeful=True)


def _may_go(unit: UnitView) -> bool:
    if unit.phase is Phase.LEAVING:
        return not unit.note
    return unit.phase is Phase.DRAINING or not unit.pinned


def no_device(draft: Draft, demand: Demand, place: Place) -> Explanation:
    """All its devices are faulty or gone."""
    reason = f"{demand.model} cannot be loaded on {place.device}: {fault(draft.room, place.device)}"
    if demand.preload:
        return draft.reasons.plain(demand.model, "wait", reason)
    return draft.refuse("not_ready", draft.reasons.plain(demand.model, "refuse", reason))


def await_answer(draft: Draft, demand: Demand, sound: Sequence[Place]) -> Explanation | None:
    """Wait where only a server that is being asked for the first time is in the way; None: nobody like that is."""
    for place in sound:
        other = blocker(draft, place)
        if other is not None and not other.asked and not too_large(draft.room, place):
            reason = f"{demand.model} waits for {other.name} to be asked what it has on {place.device}"
            return draft.reasons.at(place, "wait", reason)
    return None


def give_up(draft: Draft, usable: Sequence[Place], sound: Sequence[Place]) -> Explanation:
    """As things are, no device can ever have it. The most hopeful obstacle is the one that is told."""
    if usable:
        place = min(usable, key=lambda each: missing(draft, each))
        reason = draft.reasons.hopeless(place, _stuck(draft, place), missing(draft, place))
        return draft.refuse("insufficient_memory", draft.reasons.at(place, "refuse", reason))
    blocked = [
        (place, other) for place in sound if (other := blocker(draft, place)) and not too_large(draft.room, place)
    ]
    for place, other in blocked:
        if other.phase is Phase.LEAVING:
            reason = f"nothing is loaded on {place.device} until {other.name} has been unloaded: {other.note}"
            return draft.refuse("lifecycle_pending", draft.reasons.at(place, "refuse", reason))
    for place, other in blocked:
        note = f" ({other.note})" if other.note else ""
        reason = f"nothing is loaded on {place.device} while nobody knows what {other.name} has there{note}"
        return draft.refuse("insufficient_memory", draft.reasons.at(place, "refuse", reason))
    place = max(sound, key=lambda each: draft.room.limit(each.device))
    return draft.refuse("insufficient_memory", draft.reasons.at(place, "refuse", draft.reasons.too_large(place)))


def _stuck(draft: Draft, place: Place) -> list[UnitView]:
    """The units whose bytes will not come back for it."""
    pool = draft.room.pool(place.device)
    return [
        each
        for each in draft.world.units
        if each.hold and each.device is not None and draft.room.pool(each.device) == pool
        and each.phase is not Phase.ABSENT and (each.phase not in HOLDING or not _may_go(each))
    ]  # fmt: skip
