"""PrefixCache: the KV of prompts and answers that were, for a prompt that begins alike. Bounded by bytes.

Instead of mlx-lm's LRUPromptCache, which needs 0.26 s to find anything beside a kept text of 16,000 tokens (it walks a
tree of dicts and copies the way at each step), and forgets what is used as soon as what is not.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

from slimproc.engines.mlx.library import can_trim, mx, trim
from slimproc.engines.prefix import common_prefix

_MOST_ENTRIES = 64
"""Each is compared with every new prompt."""


class Entry(NamedTuple):
    """``cache`` holds the KV of exactly ``tokens``, one sequence."""

    tokens: list[int]
    cache: list[Any]
    size: int


class PrefixCache:
    """The least recently used goes first. What is kept is never changed: it is lent as a copy."""

    def __init__(self, limit: int) -> None:
        """``limit`` in bytes."""
        self._limit = limit
        self._entries: list[Entry] = []
        """The one used last at the end."""
        self.size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def longest(self, prompt: list[int]) -> int:
        """How many tokens ``lend`` would give."""
        return max((_usable(prompt, entry) for entry in self._entries), default=0)

    def lend(self, prompt: list[int]) -> tuple[list[Any], int] | None:
        """A cache with the first so many tokens of ``prompt``, always fewer than all; None where nothing begins alike."""
        usable = [_usable(prompt, entry) for entry in self._entries]
        shared = max(usable, default=0)
        if shared == 0:
            return None
        entry = self._entries.pop(usable.index(shared))
        self._entries.append(entry)
        cache = copy.deepcopy(entry.cache)  # arrays are shared, and only the counters are new
        if shared < len(entry.tokens):
            trim(cache, len(entry.tokens) - shared)
        return cache, shared

    def keep(self, tokens: list[int], cache: list[Any]) -> None:
        """Take over ``cache``, which holds exactly ``tokens``. Evaluates it, so that nothing lazy holds on to a batch."""
        mx.eval([layer.state for layer in cache])
        entry = Entry(tokens, cache, sum(layer.nbytes for layer in cache))
        if entry.size > self._limit or not tokens:
            return
        if can_trim(cache):
            for other in list(self._entries):
                shared = common_prefix(tokens, other.tokens)
                if shared == len(tokens) and can_trim(other.cache):
                    return  # a longer one is there
                if shared == len(other.tokens):
                    self._drop(other)
        self._entries.append(entry)
        self.size += entry.size
        while self.size > self._limit or len(self._entries) > _MOST_ENTRIES:
            self._drop(self._entries[0])

    def _drop(self, entry: Entry) -> None:
        place = next(place for place, other in enumerate(self._entries) if other is entry)
        del self._entries[place]
        self.size -= entry.size


def _usable(prompt: list[int], entry: Entry) -> int:
    """How much of ``prompt`` an entry can spare it. A recurrent state cannot go back to where the two part."""
    shared = min(common_prefix(prompt, entry.tokens), len(prompt) - 1)
    return shared if shared == len(entry.tokens) or can_trim(entry.cache) else 0
