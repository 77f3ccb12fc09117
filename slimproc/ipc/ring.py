"""The ring: frames of bytes from one writer (an engine) to one reader (the front) through shared memory.

There is no head and no tail in the memory. What may be read, and what may be overwritten, is told by credit alone;
``docs/ring-format.md`` has the layout and the argument.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import NamedTuple
from zlib import crc32

from slimproc.errors import RingCorrupt
from slimproc.ipc.credit import Credit
from slimproc.ipc.region import (
    HEADER_BYTES,
    INSIDE_AT,
    BlackBox,
    Progress,
    create_region,
    map_region,
    read_black_box,
    read_progress,
    write_black_box,
    write_progress,
)
from slimproc.ipc.wire import EVENT, STEP

__all__ = ["PAD", "BlackBox", "Progress", "RingReader", "RingStatistics", "RingWriter", "create_region"]

PAD = 2
"""Fills the rest of the ring where a frame does not fit before the end; handled in here."""
_HEADER = struct.Struct("<IIII")
"""Payload length, CRC, sequence number, type; the type's upper half is flags, of which there are none yet.

The CRC starts from length and type, so that it covers them; the sequence number is compared with the one that is due.
"""
_MASK = 0xFFFFFFFF
_PIPE_HOLD_BACK = 32 * 1024
_TURN_NS = 1_000_000
_SMALL = 1024
"""Bytes; after a bigger frame the clock is always read, after smaller ones every fourth time."""

FrameHandler = Callable[[int, bytes, bool], None]
"""Called with type, payload, and whether this frame is all that was there to read."""


class RingStatistics(NamedTuple):
    """A reader's counts since it was made; ``bytes`` are of the ring, headers and padding included."""

    capacity: int
    frames: int
    bytes: int
    wakeups: int
    pending: int


class RingReader:
    """The front's end: a read-only map. All calls come from one thread."""

    def __init__(self, fd: int, data_credit: Credit, space_credit: Credit, *, epoch: int) -> None:
        """``fd`` may be closed afterwards; the credits stay the caller's. Raises RingCorrupt when the memory is not
        the ring of this ``epoch``, and OSError.
        """
        self._memory, header = map_region(fd, writable=False)
        if header.epoch != epoch:
            self._memory.close()
            raise RingCorrupt(f"the ring belongs to incarnation {header.epoch}, not to {epoch}")
        self._data = data_credit
        self._space = space_credit
        self._capacity = header.capacity
        self._end = HEADER_BYTES + header.capacity
        self._checked = header.crc
        # Space goes back in lumps: it saves a call per wake-up and spares a waiting writer a wake-up per frame. A
        # frame and its padding need at most capacity / 4 + 16 bytes, so what is held back can never be what it waits
        # for. With pipes 32 KiB besides, which is less than the smallest pipe full of credit records stands for, so
        # that a writer whose credit was delayed is always woken by space.
        self._hold_back = min(header.capacity // 8, _PIPE_HOLD_BACK) if header.pipe else header.capacity // 8
        self._owed = 0
        self._at = HEADER_BYTES
        self._sequence = 0
        self._frames = 0
        self._bytes = 0
        self._wakeups = 0
        self.pending = 0
        """Bytes that were credited and are not read yet."""

    @property
    def fd(self) -> int:
        """Readable when there is something to drain."""
        return self._data.fd

    @property
    def ended(self) -> bool:
        """The writer is gone and ``fd`` says so by being readable for ever (pipe credit only): stop watching it."""
        return self._data.ended

    def drain(self, on_frame: FrameHandler, budget_frames: int = 16) -> bool:
        """Hand frames to ``on_frame``: at most ``budget_frames``, for about a millisecond.

        True: there may be more, so call again soon. False: all that was credited has been read. ``alone`` is true for
        a frame that is the only one waiting. An exception of ``on_frame`` passes through, and its frame counts as
        read. Raises RingCorrupt, then and at every later call: there is no resynchronisation.
        """
        left = known = self.pending
        if not known:
            # Pairs with commit(): the frames' bytes were stored before this credit was added, and no byte beyond it
            # is looked at. While some is left, asking for more would only cost a call.
            left = self.pending = self._data.take()
            if not left:
                return False
        if left > self._capacity:
            raise RingCorrupt(f"{left} bytes are credited in a ring of {self._capacity}")
        memory, end, checked = self._memory, self._end, self._checked
        at, sequence, budget, until = self._at, self._sequence, budget_frames, 0
        self._wakeups += 1
        try:
            while left:
                length, crc, number, kind = _HEADER.unpack_from(memory, at)
                size = 16 + (length + 15 & ~15)
                if number != sequence or size > left or at + size > end:
                    raise self._inconsistent(at, sequence, left, (length, number, kind))
                # One private copy, then check and decode that: the writer could still change the memory.
                payload = memory[at + 16 : at + 16 + length] if kind != PAD else b""
                if checked and crc32(payload, length ^ kind << 20) != crc:
                    raise RingCorrupt(f"frame {sequence} at {at} does not match its checksum")
                if kind != STEP and kind != EVENT and kind != PAD:  # noqa: PLR1714  # a set costs more here
                    raise RingCorrupt(f"frame {sequence} at {at} has unknown type or flags {kind:#x}")
                at += size
                if at == end:
                    at = HEADER_BYTES
                sequence = sequence + 1 & _MASK
                left -= size
                if kind == PAD:
                    continue
                budget -= 1
                on_frame(kind, payload, not left and budget + 1 == budget_frames)
                if not budget:
                    break
                if left and (size > _SMALL or not budget & 3):
                    now = monotonic_ns()
                    if not until:
                        until = now + _TURN_NS
                    elif now > until:
                        break
        finally:
            self._at, self._sequence = at, sequence
            self._frames += budget_frames - budget
            self._give_back(self.pending - left)
            self.pending = left
        return left > 0 or known > 0

    def progress(self) -> Progress:
        """Advisory: what the engine last said of itself."""
        return read_progress(self._memory)

    def black_box(self) -> BlackBox:
        """Advisory: what the engine was about to do. Meant to be read after its death."""
        return read_black_box(self._memory)

    def statistics(self) -> RingStatistics:
        return RingStatistics(self._capacity, self._frames, self._bytes, self._wakeups, self.pending)

    def close(self) -> None:
        """Unmap. May be called twice."""
        self._memory.close()

    def _give_back(self, consumed: int) -> None:
        self._bytes += consumed
        self._owed += consumed
        if self._owed >= self._hold_back:
            # Pairs with refresh(): the frames were copied out before their space is given back.
            self._space.add(self._owed)
            self._owed = 0

    def _inconsistent(self, at: int, sequence: int, left: int, frame: tuple[int, int, int]) -> RingCorrupt:
        length, number, kind = frame
        return RingCorrupt(
            f"at {at} of {self._end}, with {left} bytes credited, frame {sequence} was due;"
            f" found number {number}, type {kind}, {length} bytes"
        )

    def __repr__(self) -> str:
        return f"<RingReader at {self._at} of {self._end}, frame {self._sequence}, {self.pending} pending>"


class RingWriter:
    """The engine's end. All calls come from one thread; none of them waits."""

    def __init__(self, fd: int, data_credit: Credit, space_credit: Credit) -> None:
        """``fd`` may be closed afterwards; the credits stay the caller's. Raises RingCorrupt, OSError."""
        self._memory, header = map_region(fd, writable=True)
        self._data = data_credit
        self._space = space_credit
        self._checked = header.crc
        self.epoch = header.epoch
        self.max_payload = header.max_payload
        """Bytes of one frame's payload: an eighth of the capacity, so that a frame always fits in the end."""
        self.free = header.capacity
        """Bytes that may be written, as far as is known without asking; ``refresh`` asks."""
        self.full_hits = 0
        self.merged_tokens = 0
        self._at = HEADER_BYTES
        self._end = HEADER_BYTES + header.capacity
        self._sequence = 0
        self._pads = 0
        self._bytes = 0
        self._pending = 0

    @property
    def space_fd(self) -> int:
        """Readable when the reader has given space back."""
        return self._space.fd

    @property
    def reader_gone(self) -> bool:
        """Nobody will give space back any more (told by the pipe credit only)."""
        return self._space.ended

    @property
    def debt(self) -> int:
        """Bytes committed whose credit the kernel has not taken yet; ``commit`` tries again."""
        return self._data.debt

    def put(self, kind: int, payload: bytes) -> bool:
        """Copy one frame in, unseen until ``commit``. False: the ring is full and nothing was written.

        Raises ValueError for more than ``max_payload`` bytes.
        """
        length = len(payload)
        if length > self.max_payload:
            raise ValueError(f"a frame takes {self.max_payload} bytes, not {length}")
        size = 16 + (length + 15 & ~15)
        at = self._at
        if size > self.free or at + size > self._end:
            if not self.fits(length):
                return False
            at = self._wrap(size)
        sequence, memory = self._sequence, self._memory
        memory[at + 16 : at + 16 + length] = payload
        crc = crc32(payload, length ^ kind << 20) if self._checked else 0
        _HEADER.pack_into(memory, at, length, crc, sequence, kind)
        self._sequence = sequence + 1 & _MASK
        self._at = at + size
        self.free -= size
        self._pending += size
        return True

    def fits(self, length: int) -> bool:
        """Whether ``put`` would take a payload of ``length`` bytes now."""
        size = 16 + (length + 15 & ~15)
        room = self._end - self._at
        total = size if size <= room else size + room
        return total <= self.free or total <= self.refresh()

    def refresh(self) -> int:
        """Take the space that the reader gave back. Returns ``free``."""
        # Pairs with the reader's _give_back(): it has done with these bytes.
        self.free += self._space.take()
        return self.free

    def commit(self) -> None:
        """Publish all frames put since the last commit, with one call of the kernel."""
        pending = self._pending
        if pending:
            # Pairs with drain(): the kernel's lock orders the stores above before the reader's loads.
            self._data.add(pending)
            self._pending = 0
            self._bytes += pending
        elif self._data.debt:
            self._data.flush()

    def set_phase(self, phase: int, rids: Sequence[int]) -> None:
        """Leave word, before a native call, of what it is about: of ``rids``, the last 110 are kept."""
        write_black_box(self._memory, phase, rids)

    def mark_inside(self, inside: int) -> None:
        """1: a native call begins; 0: it has returned."""
        self._memory[INSIDE_AT] = inside

    def mark_step(self, steps: int, now_ns: int) -> None:
        """Say how far this engine has come: ``steps`` done, the last at ``now_ns`` (``time.monotonic_ns()``)."""
        frames = self._sequence - self._pads & _MASK
        write_progress(self._memory, (steps, now_ns, frames, self._bytes, self.full_hits, self.merged_tokens))

    def close(self) -> None:
        """Unmap. What was not committed is lost. May be called twice."""
        self._memory.close()

    def _wrap(self, size: int) -> int:
        """Where the next ``size`` bytes go, with the rest of the ring padded where that is its beginning."""
        at = self._at
        room = self._end - at
        if size <= room:
            return at
        if room:  # at least the 16 bytes of a header, since every size is a multiple of that
            sequence, length = self._sequence, room - 16
            crc = length ^ PAD << 20 if self._checked else 0
            _HEADER.pack_into(self._memory, at, length, crc, sequence, PAD)
            self._sequence = sequence + 1 & _MASK
            self._pads += 1
            self.free -= room
            self._pending += room
        return HEADER_BYTES

    def __repr__(self) -> str:
        return f"<RingWriter at {self._at} of {self._end}, frame {self._sequence}, {self.free} free>"
