"""Quarantine: which work has killed engines, by its digest, so that it is not tried on one engine after another."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from slimproc.request import NEVER, Work

FATAL_DEATHS: Final = 2
"""So many engines may die of the same work; then it is refused."""
REFUSED_FOR: Final = 600.0
"""Seconds after the last death. A death is forgotten as late as that, too."""
MOST_DIGESTS: Final = 1024

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


def digest_of(request: Work) -> bytes:
    """Of all that determines the computation: not of who asks, nor of how long they wait."""
    work = msgspec.structs.replace(request, id="", deadline=NEVER, queue_deadline=NEVER)
    return hashlib.blake2b(type(work).__name__.encode() + _encode(work), digest_size=16).digest()


class Quarantine:
    """Remembers ``MOST_DIGESTS`` at most; those whose last death is the longest ago go first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deaths: OrderedDict[tuple[str, bytes], tuple[float, frozenset[int]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._deaths)

    def note(self, request: Work, death: int) -> bool:
        """The engine numbered ``death`` died while this work was inside its native call. True: it has just become poison.

        However many copies or choices of the work were in the engine, it is one death.
        """
        key = request.model, digest_of(request)
        before = self._known(key)
        deaths = before | {death}
        if deaths == before:
            return False
        self._deaths[key] = self._clock(), deaths
        self._deaths.move_to_end(key)
        if len(self._deaths) > MOST_DIGESTS:
            self._deaths.popitem(last=False)
        return len(before) < FATAL_DEATHS <= len(deaths)

    def refuses(self, request: Work) -> bool:
        """Costs a digest only while something is remembered at all."""
        return bool(self._deaths) and len(self._known((request.model, digest_of(request)))) >= FATAL_DEATHS

    def suspects(self, request: Work) -> bool:
        """An engine has died of it, or of what was in the same batch."""
        return bool(self._deaths) and bool(self._known((request.model, digest_of(request))))

    def clear(self, model: str) -> None:
        """Forget what is held against the work of one model."""
        for key in [key for key in self._deaths if key[0] == model]:
            del self._deaths[key]

    def _known(self, key: tuple[str, bytes]) -> frozenset[int]:
        at, deaths = self._deaths.get(key, (0.0, frozenset[int]()))
        if deaths and self._clock() - at >= REFUSED_FOR:
            del self._deaths[key]
            return frozenset()
        return deaths
