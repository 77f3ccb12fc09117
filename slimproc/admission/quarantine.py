"""Quarantine: which work has killed engines, by its digest, so that it is not tried on one engine after another."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from slimproc.ipc import wire
from slimproc.request import NEVER, EmbedRequest, GenerateRequest, Work

FATAL_DEATHS: Final = 2
"""So many engines may die of the same work; then it is refused."""
REFUSED_FOR: Final = 600.0
"""Seconds after the last death. A death is forgotten as late as that, too."""
MOST_DIGESTS: Final = 1024
MOST_PARDONS: Final = 2
"""Times that work which ends well after a death is believed to have had bad company."""

Question = wire.Tokenize | wire.Detokenize
Suspect = Work | Question
"""What an engine can die of."""

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


def digest_of(work: Suspect) -> bytes:
    """Of all that determines the computation: not of who asks, nor of how long they wait."""
    if isinstance(work, GenerateRequest | EmbedRequest):
        work = msgspec.structs.replace(work, id="", deadline=NEVER, queue_deadline=NEVER)
    else:
        work = msgspec.structs.replace(work, question=0)
    return hashlib.blake2b(type(work).__name__.encode() + _encode(work), digest_size=16).digest()


@dataclass
class _Record:
    at: float
    """Of the last death."""
    deaths: frozenset[int]
    pardons: int = 0


class Quarantine:
    """Remembers ``MOST_DIGESTS`` at most; those whose last death is the longest ago go first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: OrderedDict[tuple[str, bytes], _Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def note(self, model: str, work: Suspect, death: int) -> bool:
        """The engine numbered ``death`` died while this work was inside its native call. True: it has just become poison.

        However many copies or choices of the work were in the engine, it is one death.
        """
        key = model, digest_of(work)
        record = self._known(key) or _Record(0.0, frozenset())
        if death in record.deaths:
            return False
        record.at, record.deaths = self._clock(), record.deaths | {death}
        self._records[key] = record
        self._records.move_to_end(key)
        if len(self._records) > MOST_DIGESTS:
            self._records.popitem(last=False)
        return len(record.deaths) == FATAL_DEATHS

    def refuses(self, model: str, work: Suspect) -> bool:
        """Costs a digest only while something is remembered at all."""
        record = self._record(model, work)
        return record is not None and len(record.deaths) >= FATAL_DEATHS

    def suspected_since(self, model: str, work: Suspect) -> float | None:
        """When an engine last died of it, or of what was in the same batch; None: none did, or it is pardoned."""
        record = self._record(model, work)
        return record.at if record is not None and record.deaths else None

    def pardon(self, model: str, work: Suspect) -> None:
        """It has ended well: what died with it, died of something else. A few times this is believed."""
        record = self._record(model, work)
        if record is not None and record.pardons < MOST_PARDONS:
            record.deaths = frozenset()
            record.pardons += 1

    def clear(self, model: str) -> None:
        """Forget what is held against the work of one model."""
        for key in [key for key in self._records if key[0] == model]:
            del self._records[key]

    def _record(self, model: str, work: Suspect) -> _Record | None:
        return self._known((model, digest_of(work))) if self._records else None

    def _known(self, key: tuple[str, bytes]) -> _Record | None:
        record = self._records.get(key)
        if record is not None and self._clock() - record.at >= REFUSED_FOR:
            del self._records[key]
            return None
        return record
