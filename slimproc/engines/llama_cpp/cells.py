"""Cells: that no sequence meets values in its KV cells which are no numbers and which another has left there.

What is cut off a KV stream is masked and not erased, and a masked NaN is a NaN still: it takes part in sums, times 0. So
one prompt whose values overflow would fail the next one in its slot, and whoever copies that slot; the state of a
recurrent model would fail them all. What the logits of the last token of every chunk say is noted, therefore. Cells that
are not sound are written over before anybody else uses them, and a sequence for which that cannot be done yet waits.
"""

from __future__ import annotations

import math
from typing import Any

from slimproc.engines.llama_cpp.drawing import Floats
from slimproc.engines.llama_cpp.library import lib
from slimproc.engines.llama_cpp.slot import Slot
from slimproc.engines.llama_cpp.slots import SlotView


class Cells:
    """Those of all slots. ``streams``: each slot has its own, which a copy of another writes over whole. Otherwise slots
    share what is free, and nothing may begin before all of it is erased.
    """

    def __init__(self, memory: Any, slots: list[Slot], *, streams: bool) -> None:
        self._memory = memory
        self._slots = slots
        self._streams = streams
        self.held: list[Slot] = []
        """Slots whose sequences must not be evaluated yet, oldest first."""

    @staticmethod
    def view(slot: Slot) -> SlotView:
        """The slot as ``choose_slot`` is to see it: what is not sound is of no use."""
        return SlotView(slot.sequence is not None, slot.tokens[: slot.past] if slot.sound else [], slot.used)

    @staticmethod
    def judge(slot: Slot, row: Floats) -> bool:
        """Whether what it has evaluated are numbers. ``row``: the logits of its last token, which attends to all others."""
        numbers = not math.isnan(row[0])  # one NaN in a token's hidden state makes all its logits NaN
        slot.sound &= numbers
        return numbers

    def hold(self, slot: Slot) -> None:
        """A sequence has taken the slot. It waits if the cells are not sound, and behind others that wait: else those
        could wait for ever.
        """
        if self.held or not self._fit(slot):
            self.held.append(slot)

    def leave(self, slot: Slot) -> None:
        if slot in self.held:
            self.held.remove(slot)

    def release(self, running: int) -> None:
        """Clean what can be cleaned now, and let its sequences go. ``running``: how many sequences are not held."""
        while self.held:
            slot = self.held[0]
            if not self._fit(slot):
                source = next((other for other in self._slots if other.sound), None)
                if self._streams and source is not None:
                    self._write_over(slot, source)
                elif running == 0:
                    self._erase()
                else:
                    return
            del self.held[0]
            running += 1

    def _fit(self, slot: Slot) -> bool:
        return slot.sound if self._streams else all(other.sound for other in self._slots)

    def _write_over(self, slot: Slot, source: Slot) -> None:
        """A copy takes the whole stream, also the cells behind its last token."""
        lib.llama_memory_seq_rm(self._memory, slot.index, -1, -1)
        lib.llama_memory_seq_cp(self._memory, source.index, slot.index, -1, -1)
        lib.llama_memory_seq_rm(self._memory, slot.index, -1, -1)
        slot.past, slot.sound = 0, True

    def _erase(self) -> None:
        """Only while nothing runs: all that was kept goes with it."""
        lib.llama_memory_clear(self._memory, True)
        for slot in self._slots:
            slot.past, slot.sound = 0, True
            if slot.sequence is not None:
                slot.sequence.cached_tokens = 0
