"""Which replica has read a prompt's beginning before: on hashes of blocks of the request's own text, no tokens needed.

The front cannot see an engine's cache, but it knows what it sent: an engine keeps the last prompt of each slot, so the
last few prompts of each replica are remembered here, as chains of block hashes. A guess that is wrong costs one prefill.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

import msgspec

from slimproc.request import ChatPrompt, Prompt

BLOCK = 256
"""Characters (or token ids) in a block: some 60 tokens, below which a prefill is not worth a detour."""
LONGEST = 256
"""Blocks that are looked at: prompts that agree on so much are the same to us, and hashing stays under a millisecond."""

Chain = tuple[int, ...]
"""One hash per block, each over the whole text up to the block's end."""

_encode = msgspec.json.Encoder().encode


def chain(prompt: Prompt) -> Chain:
    """The block hashes of a prompt; a last block that is not full has none, since the next prompt may go on in it."""
    text: str | bytes | list[int] = _encode(prompt.messages) if isinstance(prompt, ChatPrompt) else prompt
    hashes = []
    so_far = 0
    for start in range(0, min(len(text) - BLOCK + 1, LONGEST * BLOCK), BLOCK):
        block = text[start : start + BLOCK]
        so_far = hash((so_far, tuple(block) if isinstance(block, list) else block))
        hashes.append(so_far)
    return tuple(hashes)


class PrefixMemory:
    """The chains of the prompts that one engine was sent last, as many as it has slots."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._chains: OrderedDict[Chain, None] = OrderedDict()
        self._blocks: Counter[int] = Counter()

    def __len__(self) -> int:
        """Prompts that are remembered."""
        return len(self._chains)

    def note(self, sent: Chain) -> None:
        """A prompt was sent; it takes its own place, that of one that it shares at least half of, or else of the oldest.

        As in the engine, where a slot is taken over by a prompt that begins with most of its tokens: many endings to one
        beginning take one place, and do not push out other beginnings.
        """
        if not sent:
            return
        alike = (known for known in self._chains if _shares_half(known, sent))
        known = sent if sent in self._chains else next(alike, None)
        if known is not None:
            self._forget(known)
        elif len(self._chains) >= self._slots:
            self._forget(next(iter(self._chains)))
        self._chains[sent] = None
        self._blocks.update(sent)

    def _forget(self, chain: Chain) -> None:
        del self._chains[chain]
        self._blocks.subtract(chain)
        self._blocks += Counter()  # drops what has come to zero

    def longest(self, wanted: Sequence[int]) -> int:
        """How many blocks of a prompt's beginning are remembered. A hash says all of the text before it, too."""
        return next((count for count in range(len(wanted), 0, -1) if wanted[count - 1] in self._blocks), 0)


def _shares_half(known: Chain, sent: Chain) -> bool:
    """Whether ``sent`` begins with at least half of ``known``'s blocks: a hash says all of the text before it, too."""
    last = (len(known) - 1) // 2
    return last < len(sent) and known[last] == sent[last]
