"""Speculation: which running answers have tokens evaluated in case they are the next ones, and how many."""

from __future__ import annotations

from collections.abc import Sequence

from slimproc.engines.llama_cpp.slot import Slot


def guess_ahead(slots: Sequence[Slot], most: int, room: int) -> bool:
    """Give each of ``slots``, which all have one token to evaluate, a guess of as many tokens; else none has any.

    ``most`` tokens for each, ``room`` for all. llama.cpp makes a pass over the weights for each number of tokens that
    sequences have in a batch, so guesses of unequal length would cost what they are to save.
    """
    count = min(most, room // len(slots), *(slot.room for slot in slots))
    guesses: list[list[int]] = []
    for slot in slots:
        guess = slot.lookup.guess(slot.tokens, count) if count > 0 else []
        count = len(guess)
        guesses.append(guess)
    for slot, guess in zip(slots, guesses, strict=True):
        slot.guess = guess[:count]
    return count > 0
