"""Which tokens go into the next call of the model, and in which order. Pure decisions; ``backend.py`` acts on them.

llama.cpp cuts a batch into passes over the weights, and with a KV stream for each slot a pass takes only slots that
follow one another. Each gap or disorder is one more pass (40 instead of 30 ms a step), so batches are sorted by slot
and single gaps are closed: by a token of a waiting prompt, or by a filler that is taken back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Chunk(NamedTuple):
    """``tokens`` tokens of one slot. A filler's token means nothing and is taken back after the call."""

    slot: int
    tokens: int
    filler: bool = False


def plan_batch(
    pending: list[tuple[int, int]], *, budget: int, room: int, can_fill: Callable[[int], bool]
) -> list[Chunk]:
    """The chunks of the next call, by slot.

    ``pending``: (slot, tokens not yet evaluated) of every sequence, oldest first. Who needs one token gets it, for
    that is a running answer; prompts share ``budget`` tokens, the oldest first. ``room``: tokens the call can take.
    ``can_fill``: whether a slot without a sequence can take a filler.
    """
    counts = {slot: 1 for slot, tokens in pending if tokens == 1}
    prompts = {slot: tokens for slot, tokens in pending if tokens > 1}
    left = min(budget, room - len(counts))
    for slot, tokens in prompts.items():
        if left <= 0:
            break
        counts[slot] = min(tokens, left)
        left -= counts[slot]
    left = room - sum(counts.values())
    fillers = set()
    for slot in single_gaps(counts):
        if left <= 0:
            break
        if slot in prompts:
            counts[slot] = 1
        elif can_fill(slot):
            counts[slot] = 1
            fillers.add(slot)
        else:
            continue
        left -= 1
    return [Chunk(slot, counts[slot], slot in fillers) for slot in sorted(counts)]


def single_gaps(slots: dict[int, int]) -> list[int]:
    """Slots that are not among ``slots`` while both their neighbours are."""
    return [slot + 1 for slot in sorted(slots) if slot + 1 not in slots and slot + 2 in slots]


def passes(slots: set[int]) -> int:
    """Over how many runs of consecutive numbers ``slots`` are spread."""
    return sum(slot - 1 not in slots for slot in slots)
