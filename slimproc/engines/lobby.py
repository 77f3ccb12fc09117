"""Lobby: an engine's sequences that are not in its batch yet: they wait for their grammar, or for room."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from slimproc.ipc import wire

if TYPE_CHECKING:
    from slimproc.engines.sequence import Sequence


class Lobby:
    """Compiling takes seconds at worst, and one grammar comes after the other: others may have the slots of those that
    wait for one. With their grammar they want a slot again, and get the next that becomes free.
    """

    def __init__(self) -> None:
        self._compiling: dict[int, tuple[Sequence, wire.Submit]] = {}
        self._entering: dict[int, tuple[Sequence, wire.Start]] = {}
        """They lack nothing but room in the batch; the first first."""
        self._lent: set[int] = set()
        """Those whose slot the front may have given away, also when they are in the batch; perhaps some that have ended."""

    @property
    def compiling(self) -> bool:
        """Whether anybody waits for a grammar."""
        return bool(self._compiling)

    @property
    def entering(self) -> int | None:
        """The number of the sequence that is to join next."""
        return next(iter(self._entering), None)

    def slots_taken(self, running: Iterable[int]) -> int:
        """By those here and those in the batch (``running``), without those who did not need theirs when others came."""
        present = {*running, *self._compiling, *self._entering}
        self._lent &= present
        return len(present) - len(self._lent)

    def await_grammar(self, sequence: Sequence, command: wire.Submit) -> bool:
        """True: others may have its slot meanwhile, and the front is to be told."""
        lent = len(self._lent & self._compiling.keys()) < wire.MOST_ASIDE
        self._compiling[command.rid] = sequence, command
        if lent:
            self._lent.add(command.rid)
        return lent

    def compiled(self, rid: int) -> tuple[Sequence, wire.Submit, bool] | None:
        """It waits for its grammar no more. The flag is what ``await_grammar`` said. None: it has left meanwhile."""
        found = self._compiling.pop(rid, None)
        return None if found is None else (*found, rid in self._lent)

    def await_room(self, sequence: Sequence, command: wire.Start) -> None:
        self._entering[command.rid] = sequence, command

    def pop_entering(self) -> tuple[Sequence, wire.Start]:
        """The one that is to join next."""
        return self._entering.pop(next(iter(self._entering)))

    def leave(self, rid: int) -> Sequence | None:
        """Wherever it is; None: it is not here."""
        found = self._compiling.pop(rid, None) or self._entering.pop(rid, None)
        return None if found is None else found[0]
