"""Which slot a new sequence takes, and how much of its prompt that slot already holds. Pure decisions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from slimproc.engines.llama_cpp.batch import passes
from slimproc.engines.prefix import common_prefix

_COPY_AT_LEAST = 32
"""Shared tokens that a copy must save."""
_COPY_IN_TOKENS = 10
"""Copying a slot's whole KV takes as long as evaluating about so many prompt tokens."""
_PASS_IN_TOKENS = 64
"""One more pass in every step of an answer weighs as much as evaluating so many prompt tokens again."""


class SlotView(NamedTuple):
    """A slot as the decision sees it: ``kept`` are the tokens whose KV it holds, exactly."""

    busy: bool
    kept: list[int]
    used: int
    """A clock that grows with every use; 0 for a slot that was never used."""


class Choice(NamedTuple):
    """``cached`` tokens at the prompt's start need no evaluation, once ``copy_from``'s KV (if any) was copied over."""

    slot: int
    cached: int
    copy_from: int | None = None


def choose_slot(prompt: list[int], slots: Sequence[SlotView], *, rewinds: bool = True) -> Choice:
    """Where ``prompt`` goes; at least one of its tokens is left to evaluate. Some slot must be free.

    The free slot that costs least, all counted in prompt tokens: those that remain to be evaluated after its own
    beginning was kept or another slot's was copied there, those that only this slot holds and that somebody may come back
    for, and the passes over the weights that running slots need which do not stand together.
    ``rewinds`` False: the model cannot take tokens back, so only a slot that ``prompt`` continues is of use.
    """
    shared = [_shared(prompt, slot.kept, rewinds=rewinds) for slot in slots]
    best = max(range(len(slots)), key=shared.__getitem__)
    running = {index for index, slot in enumerate(slots) if slot.busy}
    elsewhere = _kept_elsewhere([slot.kept for slot in slots])
    now = 1 + max(slot.used for slot in slots)

    def copies(index: int) -> bool:
        return rewinds and shared[best] - shared[index] >= _COPY_AT_LEAST

    def cost(index: int) -> tuple[float, int, int]:
        slot = slots[index]
        safe = max(elsewhere[index], shared[index])
        lost = len(slot.kept) - safe if rewinds or safe < len(slot.kept) else 0
        # What was used a while ago is asked for less and less often: of k uses, about the k-th part.
        expected = lost / (1 + now - slot.used)
        evaluated = -shared[best] + _COPY_IN_TOKENS if copies(index) else -shared[index]
        return _PASS_IN_TOKENS * passes(running | {index}) + evaluated + expected, slot.used, index

    chosen = min((index for index, slot in enumerate(slots) if not slot.busy), key=cost)
    if copies(chosen):
        return Choice(chosen, shared[best], best)
    return Choice(chosen, shared[chosen])


def _kept_elsewhere(kept: list[list[int]]) -> list[int]:
    """How many tokens of each list's beginning are the beginning of another one, too."""
    order = sorted(range(len(kept)), key=kept.__getitem__)
    found = [0] * len(kept)
    for one, following in pairwise(order):  # in this order, nobody has more in common than neighbours
        common = common_prefix(kept[one], kept[following])
        found[one] = max(found[one], common)
        found[following] = common
    return found


def _shared(prompt: list[int], kept: list[int], *, rewinds: bool) -> int:
    shared = common_prefix(prompt, kept)
    if not rewinds and shared < len(kept):
        return 0
    if shared == len(prompt):
        return shared - 1 if rewinds else 0
    return shared
