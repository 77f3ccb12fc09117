"""Credit: how many bytes of a ring the other process may touch, carried by the kernel (an eventfd, or a pipe).

A credit is the only thing that publishes. ``add`` in one process and ``take`` in the other go through the same kernel
lock, so every store made before ``add`` is seen by whoever ``take``s that credit, on every CPU; plain loads and stores
of an index in shared memory would promise nothing of the kind on ARM.
"""

from __future__ import annotations

import os
import struct
import sys
from typing import Literal, Protocol

CreditKind = Literal["eventfd", "pipe"]

_RECORD = struct.Struct("=I")
"""One publication in a pipe: native byte order, since both ends are on one machine."""
_READ_SIZE = 65536
"""A pipe's usual capacity, so that one read empties it."""


class Credit(Protocol):
    """One end of a credit channel. Nothing here ever waits; each end belongs to one thread of one process."""

    fd: int
    """For ``add_reader`` and ``poll``; -1 once closed."""
    debt: int
    """Bytes added that the kernel has not taken yet. ``add`` and ``flush`` try them again."""
    ended: bool
    """The other end is gone: there is nothing more to wait for on ``fd``, which stays readable for ever."""

    def add(self, n: int) -> None:
        """Hand ``n`` (> 0) bytes to the other side. What a full channel does not take is kept as ``debt``."""

    def flush(self) -> bool:
        """Try the debt again. True when there is none left."""

    def take(self) -> int:
        """Bytes handed to us since the last call; 0 when there are none."""

    def close(self) -> None:
        """May be called twice."""


class EventfdCredit:
    """A kernel counter: ``add`` adds to it, ``take`` reads and zeroes it. One descriptor serves both ends."""

    def __init__(self, fd: int) -> None:
        """Owns ``fd`` from now on; it must be non-blocking."""
        self.fd = fd
        self.debt = 0
        self.ended = False

    def add(self, n: int) -> None:
        try:
            os.eventfd_write(self.fd, n + self.debt)
        except BlockingIOError:  # the counter is full: only a misbehaving peer gets it there
            self.debt += n
        else:
            self.debt = 0

    def flush(self) -> bool:
        if self.debt:
            self.add(0)
        return not self.debt

    def take(self) -> int:
        try:
            return os.eventfd_read(self.fd)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        _close(self)


class PipeCredit:
    """One end of a pipe of 4-byte records whose sum is the credit; for systems without eventfd.

    A full pipe cannot lose credit, only delay it: the writing end keeps the sum and sends it with the next record.
    """

    def __init__(self, fd: int) -> None:
        """Owns ``fd`` from now on: the reading end to ``take`` from, or the writing end to ``add`` to."""
        self.fd = fd
        self.debt = 0
        self.ended = False
        self._partial = b""

    def add(self, n: int) -> None:
        n += self.debt
        try:
            os.write(self.fd, _RECORD.pack(n))
        except BlockingIOError:
            self.debt = n
        except BrokenPipeError:  # nobody is left to use it; the peer's death is told elsewhere
            self.ended = True
            self.debt = 0
        else:
            self.debt = 0

    def flush(self) -> bool:
        if self.debt:
            self.add(0)
        return not self.debt

    def take(self) -> int:
        try:
            data = os.read(self.fd, _READ_SIZE)
        except BlockingIOError:
            return 0
        if len(data) == _RECORD.size and not self._partial:
            return int.from_bytes(data, sys.byteorder)
        if not data:
            self.ended = True
            return 0
        data = self._partial + data
        whole = len(data) - len(data) % _RECORD.size
        self._partial = data[whole:]
        return sum(memoryview(data)[:whole].cast("I"))

    def close(self) -> None:
        _close(self)


class CreditPair:
    """Both ends of a fresh channel. One end's descriptor goes to a child; the other end is used here."""

    def __init__(self, reader: Credit, writer: Credit) -> None:
        self.reader = reader
        self.writer = writer

    @property
    def reader_fd(self) -> int:
        return self.reader.fd

    @property
    def writer_fd(self) -> int:
        """The same descriptor as ``reader_fd`` where an eventfd serves both ends."""
        return self.writer.fd

    def close_reader(self) -> None:
        """The child has the reading end now. An eventfd's one descriptor stays open for the end that is used here."""
        if self.reader is not self.writer:
            self.reader.close()

    def close_writer(self) -> None:
        """The child has the writing end now; see ``close_reader``."""
        if self.reader is not self.writer:
            self.writer.close()

    def close(self) -> None:
        """Close whatever is still open."""
        self.reader.close()
        self.writer.close()


def default_credit() -> CreditKind:
    """What this system does best: one counter where there is eventfd, else a pipe."""
    return "eventfd" if hasattr(os, "eventfd") else "pipe"


def create_credit(kind: str) -> CreditPair:
    """A fresh channel; its descriptors are non-blocking and closed on exec. Raises OSError; ValueError for a kind
    that does not exist.
    """
    if _checked(kind) == "eventfd":
        both = EventfdCredit(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        return CreditPair(both, both)
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    return CreditPair(PipeCredit(read_fd), PipeCredit(write_fd))


def open_credit_reader(kind: str, fd: int) -> Credit:
    """The reading end that this process was started with. Owns ``fd``, which no child of ours will inherit."""
    return _open(kind, fd)


def open_credit_writer(kind: str, fd: int) -> Credit:
    """The writing end that this process was started with; see ``open_credit_reader``."""
    return _open(kind, fd)


def _open(kind: str, fd: int) -> Credit:
    checked = _checked(kind)
    os.set_inheritable(fd, False)
    os.set_blocking(fd, False)
    return EventfdCredit(fd) if checked == "eventfd" else PipeCredit(fd)


def _checked(kind: str) -> CreditKind:
    if kind == "eventfd":
        if not hasattr(os, "eventfd"):
            raise ValueError("this system has no eventfd; use the pipe credit")
        return "eventfd"
    if kind == "pipe":
        return "pipe"
    raise ValueError(f"unknown credit {kind!r}: it is eventfd or pipe")


def _close(credit: EventfdCredit | PipeCredit) -> None:
    fd, credit.fd = credit.fd, -1
    if fd >= 0:
        os.close(fd)
