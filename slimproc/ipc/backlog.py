"""Backlog: what an engine could not publish yet, joined per sequence and cut into frames of a bounded size."""

from __future__ import annotations

from collections import deque

from slimproc.ipc import wire
from slimproc.ipc.joined import ITEM_BYTES, ScoredText, Text

STEP_BYTES = 24
"""An upper bound on what a step needs beside its items, at msgpack's widest integers."""


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
        self.entries: deque[Text | _Encoded] = deque()
        """For others to see whether there are any; the same object for ever."""
        self._open: dict[int, Text] = {}
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
            if entry is None or not entry.takes(item):
                kind = ScoredText if isinstance(item, wire.ScoredTok) else Text
                entry = self._open[item.rid] = kind(item.rid, now)
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
        items: dict[int, wire.Tok] = {}
        room = self._room
        for entry in self.entries:
            # A step has one sequence's items in one of its two lists, or their order would be lost.
            if isinstance(entry, _Encoded) or entry.size > room or entry.rid in items:
                break
            items[entry.rid] = entry.whole()
            room -= entry.size
        return Frame(wire.STEP, wire.encode(_step(at_ns, list(items.values()))), len(items))

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
            assert isinstance(head, Text)
            self.bytes -= head.drop(frame.blocks)

    def _add_encoded(self, kind: int, payload: bytes, now: float) -> None:
        self.entries.append(_Encoded(kind, payload, now))
        self.bytes += len(payload)

    def _part(self, entry: Text, at_ns: int) -> Frame:
        """The beginning of a text that is too long for a frame."""
        item, count = entry.beginning(self._room - ITEM_BYTES)
        return Frame(wire.STEP, wire.encode(_step(at_ns, [item])), 0, count)


def _step(at_ns: int, items: list[wire.Tok]) -> wire.Step:
    scored = [item for item in items if isinstance(item, wire.ScoredTok)]
    if not scored:
        return wire.Step(at_ns, items)
    return wire.Step(at_ns, [item for item in items if not isinstance(item, wire.ScoredTok)], scored)
