"""Which slot a new sequence takes, and how much of its prompt that slot already holds. Pure decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slimproc.engines.llama_cpp.batch import passes
from slimproc.engines.prefix import common_prefix

_TAKE_OVER_AT_LEAST = 16
"""Shared tokens below this (a BOS, a role's name) are no reason to prefer a slot."""
_COPY_AT_LEAST = 32
"""Copying a slot's whole KV costs as much as evaluating some ten tokens; below this it is not worth it."""
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

    A free slot whose tokens are mostly the beginning of ``prompt`` is taken over. Otherwise the slot that keeps the
    running ones together is taken, the one unused for longest, and a long common beginning is copied there.
    ``rewinds`` False: the model cannot take tokens back, so only a slot that ``prompt`` continues is of use.
    """
    shared = [_shared(prompt, slot.kept, rewinds=rewinds) for slot in slots]
    running = {index for index, slot in enumerate(slots) if slot.busy}

    def cost(index: int) -> tuple[int, int, int]:
        lost = len(slots[index].kept) - shared[index]
        take_over = shared[index] >= max(lost, _TAKE_OVER_AT_LEAST)
        gain = shared[index] if take_over else 0
        return _PASS_IN_TOKENS * passes(running | {index}) - gain, slots[index].used, index

    chosen = min((index for index, slot in enumerate(slots) if not slot.busy), key=cost)
    best = max(range(len(slots)), key=shared.__getitem__)
    if rewinds and shared[best] - shared[chosen] >= _COPY_AT_LEAST:
        return Choice(chosen, shared[best], best)
    return Choice(chosen, shared[chosen])


def _shared(prompt: list[int], kept: list[int], *, rewinds: bool) -> int:
    shared = common_prefix(prompt, kept)
    if not rewinds and shared < len(kept):
        return 0
    if shared == len(prompt):
        return shared - 1 if rewinds else 0
    return shared
