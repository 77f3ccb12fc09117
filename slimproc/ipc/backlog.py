"""Backlog: what an engine could not publish yet, joined per sequence and cut into frames of a bounded size."""

from __future__ import annotations

from collections import deque

from slimproc.ipc import wire
from slimproc.request import Usage

ITEM_BYTES = 64
"""An upper bound on what one item needs beside its text, at msgpack's widest integers."""
STEP_BYTES = 16
"""The same for a step beside its items."""


class _Text:
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

    def add(self, item: wire.Tok, block: int) -> int:
        """Join ``item`` on; blocks have at most twice ``block`` characters. Returns the bytes that came with it."""
        text = item.text
        for start in range(0, len(text), block):
            piece = text[start : start + block]
            self.pieces.append(piece)
            self.unjoined += len(piece)
            if self.unjoined >= block:
                self.blocks.append("".join(self.pieces))
                self.pieces.clear()
                self.unjoined = 0
        self.tokens += item.tokens
        self.finish = item.finish or self.finish
        self.usage = item.usage or self.usage
        added = _utf8_length(text)
        self.size += added
        return added

    def whole(self) -> wire.Tok:
        return wire.Tok(self.rid, "".join(self.blocks) + "".join(self.pieces), self.tokens, self.finish, self.usage)


class _Encoded:
    """A frame that stays as it is, in its place between the items: an event, or a step that nothing is to join."""

    __slots__ = ("kind", "payload", "since")

    def __init__(self, kind: int, payload: bytes, since: float) -> None:
        self.kind = kind
        self.payload = payload
        self.since = since


class Frame:
    """The next frame to try. ``Backlog.drop`` takes its contents out once it was put."""

    __slots__ = ("blocks", "entries", "kind", "payload")

    def __init__(self, kind: int, payload: bytes, entries: int, blocks: int = 0) -> None:
        self.kind = kind
        self.payload = payload
        self.entries = entries
        self.blocks = blocks
        """When ``entries`` is 0: how many blocks of the oldest entry's text this frame carries."""


class Backlog:
    """Oldest first. The order of one sequence's items and events is kept; between sequences it need not be."""

    def __init__(self, max_payload: int) -> None:
        self._room = max_payload - STEP_BYTES
        # A block is at most twice this many characters of at most 4 bytes: half of what a frame takes, so that a text
        # which is longer than a frame is cut between blocks.
        self._block = (self._room - ITEM_BYTES) // 16
        self.entries: deque[_Text | _Encoded] = deque()
        """For others to see whether there are any; the same object for ever."""
        self._open: dict[int, _Text] = {}
        """The entry that a sequence's next item joins."""
        self.bytes = 0
        """About what it takes in frames."""

    def oldest(self) -> float:
        """When the oldest entry came. The backlog must not be empty."""
        return self.entries[0].since

    def add_items(self, items: list[wire.Tok], now: float) -> int:
        """Take the items of a step. Returns how many tokens were joined to earlier ones."""
        joined = 0
        for item in items:
            entry = self._open.get(item.rid)
            if entry is None:
                entry = self._open[item.rid] = _Text(item.rid, now)
                self.entries.append(entry)
                self.bytes += ITEM_BYTES
            else:
                joined += item.tokens
            self.bytes += entry.add(item, self._block)
        return joined

    def add_event(self, rid: int, payload: bytes, now: float) -> None:
        """Take an encoded event. What its sequence says later comes after it."""
        self._open.pop(rid, None)
        self._add_encoded(wire.EVENT, payload, now)

    def add_step(self, payload: bytes, now: float) -> None:
        """Take an encoded step as it is. The backlog must be empty, or its items would overtake."""
        assert not self.entries
        self._add_encoded(wire.STEP, payload, now)

    def next_frame(self, at_ns: int) -> Frame:
        """The oldest entries, as many as one frame takes. The backlog must not be empty."""
        head = self.entries[0]
        if isinstance(head, _Encoded):
            return Frame(head.kind, head.payload, 1)
        if head.size > self._room:
            return self._part(head, at_ns)
        items: list[wire.Tok] = []
        room = self._room
        for entry in self.entries:
            if isinstance(entry, _Encoded) or entry.size > room:
                break
            items.append(entry.whole())
            room -= entry.size
        return Frame(wire.STEP, wire.encode(wire.Step(at_ns, items)), len(items))

    def drop(self, frame: Frame) -> None:
        """``frame`` was put: forget what it carries."""
        for _ in range(frame.entries):
            entry = self.entries.popleft()
            if isinstance(entry, _Encoded):
                self.bytes -= len(entry.payload)
                continue
            self.bytes -= entry.size
            if self._open.get(entry.rid) is entry:
                del self._open[entry.rid]
        if not frame.entries:
            head = self.entries[0]
            assert isinstance(head, _Text)
            freed = sum(map(_utf8_length, head.blocks[: frame.blocks]))
            del head.blocks[: frame.blocks]
            head.size -= freed
            self.bytes -= freed

    def _add_encoded(self, kind: int, payload: bytes, now: float) -> None:
        self.entries.append(_Encoded(kind, payload, now))
        self.bytes += len(payload)

    def _part(self, entry: _Text, at_ns: int) -> Frame:
        """The beginning of a text that is too long for a frame. Its tokens are counted with its last part."""
        room = self._room - ITEM_BYTES
        count = 0
        for block in entry.blocks:
            room -= _utf8_length(block)
            if room < 0:
                break
            count += 1
        item = wire.Tok(entry.rid, "".join(entry.blocks[:count]), 0)
        return Frame(wire.STEP, wire.encode(wire.Step(at_ns, [item])), 0, count)


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
