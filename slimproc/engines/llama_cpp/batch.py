"""Which tokens go into the next calls of the model, and in which order. Pure decisions; ``backend.py`` acts on them.

llama.cpp cuts a batch into passes over the weights, and with a KV stream for each slot a pass takes only slots that
follow one another. Each gap or disorder is one more pass (40 instead of 30 ms a step), so batches are sorted by slot
and single gaps are closed by a filler that is taken back afterwards. All slots of a pass attend to as many cells as the
longest of them has: so prompts have a call of their own, and do not make every answer beside them as dear as themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

WORTH_A_CALL = 16
"""Tokens of one prompt. ggml reads 4 in a call at two thirds of the pace of 64, and 16 at all of it."""
_LEAST_PIECE = 8
"""A smaller part of a prompt that is not the first in its call and not its own last waits: it would cost a pass of its own."""


class Chunk(NamedTuple):
    """``tokens`` tokens of one slot. A filler's token means nothing and is taken back after the call."""

    slot: int
    tokens: int
    filler: bool = False


def plan_answers(slots: Iterable[int], *, room: int, can_fill: Callable[[int], bool]) -> list[Chunk]:
    """The call for the running answers, which are in these ``slots``: one token each, by slot.

    ``room``: tokens the call can take. ``can_fill``: whether a slot without a sequence can take a filler.
    """
    counts = dict.fromkeys(slots, 1)
    fillers = [slot for slot in single_gaps(counts) if can_fill(slot)][: room - len(counts)]
    return sorted([*(Chunk(slot, 1) for slot in counts), *(Chunk(slot, 1, filler=True) for slot in fillers)])


def plan_prompts(pending: Iterable[tuple[int, int]], *, budget: int, room: int) -> list[Chunk]:
    """The call for the prompts: ``budget`` tokens together, the oldest first, and somewhat more where one ends by that.

    ``pending``: (slot, tokens not yet evaluated) of each, oldest first.
    """
    chunks: list[Chunk] = []
    left = min(budget, room)
    for slot, tokens in pending:
        if left <= 0 or (chunks and left < min(tokens, _LEAST_PIECE)):
            break
        whole = tokens <= min(left + left // 4, room)
        chunks.append(Chunk(slot, tokens if whole else left))
        left -= chunks[-1].tokens
        room -= chunks[-1].tokens
    return sorted(chunks)


def single_gaps(slots: dict[int, int]) -> list[int]:
    """Slots that are not among ``slots`` while both their neighbours are."""
    return [slot + 1 for slot in sorted(slots) if slot + 1 not in slots and slot + 2 in slots]


def passes(slots: set[int]) -> int:
    """Over how many runs of consecutive numbers ``slots`` are spread."""
    return sum(slot - 1 not in slots for slot in slots)
