"""Shares: what a tree of several processes has, when what they share is counted once.

A process's status counts a page for everybody who has it: four workers that were forked after their model was read would
have it four times. The kernel knows each one's share (proportional set size), and takes 20 ms a GiB to say it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

NOTICEABLE: Final = 64 << 20
"""Bytes that may be counted several times before it is looked at: an interpreter and its libraries are less."""
_AGAIN: Final = 5.0
"""Seconds that a share is believed."""
_COST: Final = 20.0
"""So many times what asking took is waited before asking again: looking costs 5 % of a core at most."""
_BUDGET: Final = 0.1
"""Seconds for all questions of one sample; who was not asked is next."""
_LARGEST: Final = 32 << 30
"""Bytes of a process that is not asked, since the answer would come after the probe had been taken for dead."""


class Bytes(NamedTuple):
    """``mapped`` are pages of files that are in memory now; the kernel can drop them, and others may share them."""

    private: int
    mapped: int


class _Share(NamedTuple):
    """Of the bytes in a process's status: so much is its own when what is shared is divided. ``due``: to be asked again."""

    private: float
    mapped: float
    due: float


def doubtful(found: Mapping[int, Bytes]) -> bool:
    """Whether so much may be counted several times that it matters."""
    sizes = [each.private + each.mapped for each in found.values()]
    return sum(sizes) - max(sizes, default=0) > NOTICEABLE


class Shares:
    """Remembers the shares of processes from one sample to the next."""

    def __init__(self, *, proc: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic) -> None:
        self._proc = proc
        self._clock = clock
        self._known: dict[int, dict[int, _Share]] = {}

    def keep(self, leaders: frozenset[int]) -> None:
        """Forget the trees of all others."""
        self._known = {leader: shares for leader, shares in self._known.items() if leader in leaders}

    def of_tree(self, leader: int, found: Mapping[int, Bytes]) -> Bytes:
        """The bytes of the tree, whose processes' own words are ``found``."""
        known = {pid: share for pid, share in self._known.get(leader, {}).items() if pid in found}
        began = self._clock()
        for pid in sorted(found, key=lambda one: known[one].due if one in known else 0.0):
            now = self._clock()
            if now - began > _BUDGET or (pid in known and known[pid].due > now):
                break
            known[pid] = self._ask(pid, found[pid])
        self._known[leader] = known
        typical = max(known.values(), default=_Share(1.0, 1.0, 0.0))
        shares = [(each, known.get(pid, typical)) for pid, each in found.items()]
        return Bytes(
            round(sum(each.private * share.private for each, share in shares)),
            round(sum(each.mapped * share.mapped for each, share in shares)),
        )

    def _ask(self, pid: int, told: Bytes) -> _Share:
        """All of it where the kernel does not say (an old one, or a process that may not be looked into)."""
        began = self._clock()
        rows: dict[str, int] = {}
        if told.private + told.mapped <= _LARGEST:
            with contextlib.suppress(OSError, ValueError, IndexError):
                for line in (self._proc / str(pid) / "smaps_rollup").read_text().splitlines()[1:]:
                    key, _, rest = line.partition(":")
                    rows[key] = int(rest.split()[0]) << 10
        now = self._clock()
        due = now + max(_AGAIN, _COST * (now - began))
        if not {"Pss_Anon", "Pss_Shmem", "Pss_File"} <= rows.keys():
            return _Share(1.0, 1.0, due)
        private = rows["Pss_Anon"] + rows["Pss_Shmem"]
        return _Share(_part(private, told.private), _part(rows["Pss_File"], told.mapped), due)


def _part(share: int, told: int) -> float:
    return min(1.0, share / told) if told else 1.0
