"""GrammarCache: what was compiled lately, bounded by number and by bytes, and what was refused lately."""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from slimproc.request import GrammarSpec

_MOST, _MOST_BYTES = 64, 64 << 20
_MOST_REFUSALS = 256
_TEMPORARY = 60.0
"""Seconds for which a refusal stands that another try could come out otherwise than: time ran out, on a busy machine. Such
a try holds up all other grammars, and whoever asks holds a slot meanwhile."""


class GrammarCache:
    """From any thread."""

    def __init__(
        self, most: int = _MOST, most_bytes: int = _MOST_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most, self._most_bytes, self._clock = most, most_bytes, clock
        self._compiled: OrderedDict[bytes, tuple[LLMatcher, int]] = OrderedDict()
        self._refused: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        """Why, and until when."""
        self._lock = threading.Lock()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._compiled)

    def compiled(self, spec: GrammarSpec) -> LLMatcher | None:
        """A matcher before its first token, which stays the cache's: copy it."""
        key = _key(spec)
        with self._lock:
            entry = self._compiled.get(key)
            if entry is None:
                return None
            self._compiled.move_to_end(key)
        return entry[0]

    def refusal(self, spec: GrammarSpec) -> str | None:
        refusal, until = self._refused.get(_key(spec), (None, 0.0))
        return refusal if self._clock() < until else None

    def keep(self, spec: GrammarSpec, matcher: LLMatcher, size: int) -> None:
        """``size``: bytes; what is larger than the whole cache is not kept."""
        key = _key(spec)
        size += len(spec.text)
        with self._lock:
            if key in self._compiled or size > self._most_bytes:
                return
            self._compiled[key] = matcher, size
            self.bytes += size
            while len(self._compiled) > self._most or self.bytes > self._most_bytes:
                _, (_, freed) = self._compiled.popitem(last=False)
                self.bytes -= freed

    def keep_refusal(self, spec: GrammarSpec, refusal: str, *, final: bool = True) -> None:
        """``final``: another try would end in the same way."""
        with self._lock:
            self._refused[_key(spec)] = refusal, math.inf if final else self._clock() + _TEMPORARY
            if len(self._refused) > _MOST_REFUSALS:
                self._refused.popitem(last=False)


def _key(spec: GrammarSpec) -> bytes:
    return hashlib.blake2b(spec.text.encode("utf-8", "replace"), digest_size=16, key=spec.kind.encode()).digest()
