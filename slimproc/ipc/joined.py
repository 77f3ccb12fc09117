"""What one sequence said since its last event, joined to one item to be and, when that is too long, cut again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from slimproc.ipc import wire
from slimproc.request import Usage

ITEM_BYTES = 64
"""An upper bound on what one item needs beside its text, at msgpack's widest integers."""
LOGPROB_BYTES = 28
"""The same for a token's log probability, and for an alternative, beside their tokens' bytes."""


class Text:
    """One sequence's items since its last event, as one item to be: text joined, tokens added, the end kept."""

    __slots__ = ("blocks", "finish", "pieces", "rid", "since", "size", "tokens", "unjoined", "usage")

    def __init__(self, rid: int, since: float) -> None:
        self.rid = rid
        self.since = since
        self.blocks: list[str] = []
        self.pieces: list[str] = []
        self.unjoined = 0
        """Characters in ``pieces``, which become the next block: a string object per token would cost ten times
        the text."""
        self.size = ITEM_BYTES
        self.tokens = 0
        self.finish = 0
        self.usage: Usage | None = None

    def takes(self, item: wire.Tok) -> bool:
        """Whether nothing of ``item`` would be lost."""
        return not isinstance(item, wire.ScoredTok)

    def add(self, item: wire.Tok, block: int) -> int:
        """Join ``item`` on; blocks have at most twice ``block`` characters. Returns the bytes that came with it."""
        added = self._add_text(item.text, block)
        self.tokens += item.tokens
        self.finish = item.finish or self.finish
        self.usage = item.usage or self.usage
        return added

    def _add_text(self, text: str, block: int) -> int:
        for start in range(0, len(text), block):
            piece = text[start : start + block]
            self.pieces.append(piece)
            self.unjoined += len(piece)
            if self.unjoined >= block:
                self.blocks.append("".join(self.pieces))
                self.pieces.clear()
                self.unjoined = 0
        added = utf8_length(text)
        self.size += added
        return added

    def whole(self) -> wire.Tok:
        return wire.Tok(self.rid, "".join(self.blocks) + "".join(self.pieces), self.tokens, self.finish, self.usage)

    def beginning(self, room: int) -> tuple[wire.Tok, int]:
        """As many blocks as ``room`` bytes take, as an item, and how many. The tokens are counted with the last part."""
        count = 0
        for block in self.blocks:
            room -= utf8_length(block)
            if room < 0:
                break
            count += 1
        return wire.Tok(self.rid, "".join(self.blocks[:count]), 0), count

    def drop(self, count: int) -> int:
        """Forget the first ``count`` blocks. Returns their bytes."""
        freed = sum(map(utf8_length, self.blocks[:count]))
        del self.blocks[:count]
        self.size -= freed
        return freed


class ScoredText(Text):
    """The same for items with log probabilities, which stay with their text: a block begins where an item begins."""

    __slots__ = ("logprobs",)

    def __init__(self, rid: int, since: float) -> None:
        super().__init__(rid, since)
        self.logprobs: list[list[wire.Logprob]] = []
        """One list per block; only the first block of an item has any."""

    def takes(self, item: wire.Tok) -> bool:  # noqa: ARG002  # whatever it is
        return True

    def _add_text(self, text: str, block: int) -> int:
        self.blocks += [text[start : start + block] for start in range(0, len(text), block)] or [""]
        self.logprobs += [[] for _ in range(len(self.blocks) - len(self.logprobs))]
        added = utf8_length(text)
        self.size += added
        return added

    def add(self, item: wire.Tok, block: int) -> int:
        place = len(self.blocks)
        added = super().add(item, block)
        if isinstance(item, wire.ScoredTok):
            self.logprobs[place] = item.logprobs
            size = sum(map(logprob_bytes, item.logprobs))
            self.size += size
            added += size
        return added

    def whole(self) -> wire.ScoredTok:
        every = list(chain.from_iterable(self.logprobs))
        return wire.ScoredTok(self.rid, "".join(self.blocks), self.tokens, self.finish, self.usage, every)

    def beginning(self, room: int) -> tuple[wire.Tok, int]:
        count = 0
        for size in self._sizes():
            room -= size
            if room < 0:
                break
            count += 1
        assert count, "an item's log probabilities are bounded by whoever made it"
        some = list(chain.from_iterable(self.logprobs[:count]))
        return wire.ScoredTok(self.rid, "".join(self.blocks[:count]), 0, logprobs=some), count

    def drop(self, count: int) -> int:
        freed = sum(islice(self._sizes(), count))
        del self.blocks[:count]
        del self.logprobs[:count]
        self.size -= freed
        return freed

    def _sizes(self) -> Iterator[int]:
        for text, logprobs in zip(self.blocks, self.logprobs, strict=True):
            yield utf8_length(text) + sum(map(logprob_bytes, logprobs))


def logprob_bytes(one: wire.Logprob) -> int:
    """An upper bound on what it takes in a frame."""
    return LOGPROB_BYTES + len(one.piece) + sum(LOGPROB_BYTES + len(piece) for piece, _ in one.top)


def utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
