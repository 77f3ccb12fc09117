"""Where a demanded unit is loaded, and who makes room for it: the heart of planning. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slimproc.residency.draft import Draft
from slimproc.residency.obstacles import await_answer, blocker, fault, give_up, missing, no_device, too_large
from slimproc.residency.reasons import names
from slimproc.residency.room import Place
from slimproc.residency.victims import Choice, candidates, choose
from slimproc.residency.views import Demand, Explanation, Phase, UnitView


def place(draft: Draft, demand: Demand, loadable: Sequence[UnitView]) -> Explanation:
    """Load one of the units where it fits; else make room for it; else wait, or refuse when waiting is no use."""
    room = draft.room
    if not room.devices or not any(unit.devices for unit in loadable):
        return draft.reasons.plain(demand.model, "wait", "the memory has not been measured yet")
    places = list(_places(loadable))
    sound = [each for each in places if not fault(room, each.device)]
    if not sound:
        return no_device(draft, demand, places[0])
    usable = [each for each in sound if not too_large(room, each) and not blocker(draft, each)]
    free = [each for each in usable if draft.older_waiter(each.device) is None]
    fitting = next((each for each in free if room.fits_now(each.unit, each.device)), None)
    if fitting is not None:
        reason = f"{draft.reasons.numbers(fitting)}: it is loaded"
        explanation = draft.reasons.at(fitting, "load", reason)
        draft.load(fitting)
        return explanation
    if demand.preload:
        return _leave_for_later(draft, usable, sound)
    hopeful = [each for each in usable if not room.settled(each.device) or missing(draft, each) <= 0]
    if not hopeful:
        return await_answer(draft, demand, sound) or give_up(draft, usable, sound)
    turn = [each for each in hopeful if each in free]
    return _make_room(draft, demand, turn) if turn else _await_turn(draft, hopeful[0])


def load_more(draft: Draft, units: Sequence[UnitView]) -> None:
    """Load those of a model's other units that fit without anybody's going or waiting."""
    for unit in units:
        if unit.phase is not Phase.ABSENT or unit.name in draft.taken:
            continue
        for each in _places([unit]):
            barred = draft.older_waiter(each.device) is not None
            if barred or fault(draft.room, each.device) or too_large(draft.room, each) or blocker(draft, each):
                continue
            if draft.room.fits_now(unit, each.device):
                draft.load(each)
                break


def _places(units: Sequence[UnitView]) -> Iterator[Place]:
    """Each unit on each of its devices; of units that are alike only the first."""
    known = set()
    for unit in units:
        alike = (unit.phase, unit.devices, unit.device, unit.claim, unit.hold)
        if alike not in known:
            known.add(alike)
            yield from (Place(unit, device) for device in unit.devices)


def _leave_for_later(draft: Draft, usable: Sequence[Place], sound: Sequence[Place]) -> Explanation:
    """A demand of the start evicts nobody, and nobody waits for it."""
    first = (usable or sound)[0]
    reason = f"{draft.reasons.numbers(first)}: it is loaded when somebody asks for it"
    if usable and not all(draft.room.fresh(each.device) for each in usable):
        reason = f"no fresh sample of {first.device} has come yet"
    return draft.reasons.at(first, "wait", reason)


def _make_room(draft: Draft, demand: Demand, places: Sequence[Place]) -> Explanation:
    """Choose victims. Nobody new goes while bytes may be on the way back: it might turn out that they are enough."""
    found = [(each, choice) for each in places if (choice := _choose(draft, demand, each)) is not None]
    unsettled = [each for each in places if not draft.room.settled(each.device)]
    if unsettled:
        found = [(each, choice) for each, choice in found if choice.new == 0]
        if not found:
            return _await_sample(draft, demand, unsettled[0])
    if found:
        return _evict(draft, demand, *min(found, key=lambda each: each[1].cost))
    reason = f"{draft.reasons.numbers(places[0])}: those who came before go first"
    explanation = draft.reasons.at(places[0], "wait", reason)
    draft.promise(places[0], ())
    return explanation


def _await_turn(draft: Draft, where: Place) -> Explanation:
    reason = (
        f"it is loaded after {draft.older_waiter(where.device)}, which was asked for before and waits for memory there"
    )
    return draft.reasons.at(where, "wait", f"{draft.reasons.numbers(where)}: {reason}")


def _choose(draft: Draft, demand: Demand, where: Place) -> Choice | None:
    holders = draft.room.holders(where.device)
    offered = candidates(holders, demand.model, draft.world.now, taken=draft.taken, older=draft.older)
    return choose(draft.room, where.unit, where.device, offered)


def _evict(draft: Draft, demand: Demand, where: Place, choice: Choice) -> Explanation:
    numbers, victims = draft.reasons.numbers(where), choice.victims
    if not victims:
        explanation = draft.reasons.at(where, "wait", f"{numbers}: enough bytes are on their way back")
    elif choice.ready:
        explanation = draft.reasons.at(where, "evict", f"{numbers}: {names(victims)} will make room", victims)
        draft.evict(victims, demand.model)
    else:
        later = f"{names(victims)} will make room as soon as they may be unloaded"
        explanation = draft.reasons.at(where, "wait", f"{numbers}: {later}", victims)
    draft.promise(where, victims)
    return explanation


def _await_sample(draft: Draft, demand: Demand, where: Place) -> Explanation:
    """Those who drain for it already go on: the awaited sample shows too little for a choice, until it has come."""
    going = [
        each
        for each in draft.room.holders(where.device)
        if each.phase is Phase.DRAINING and each.drained_for == demand.model and each.name not in draft.taken
    ]
    reason = f"{draft.reasons.numbers(where)}: a later sample is to show what has come free"
    explanation = draft.reasons.at(where, "wait", reason, going)
    draft.promise(where, going)
    return explanation
