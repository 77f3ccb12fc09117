"""What an engine and its grammar checker say to each other, over the checker's stdin and stdout."""

from __future__ import annotations

import os
import select
import struct
import time

import msgspec

from slimproc.request import GrammarSpec

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 16


class Table(msgspec.Struct, frozen=True):
    """The first message to the checker, once; ``READY`` is its answer. See GrammarVocabulary."""

    tokens: list[bytes]
    ends: list[int]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The checker's answer to a GrammarSpec."""

    grammar: str = ""
    """In the library's own notation: this may be compiled in the engine."""
    size: int = 0
    """Bytes of memory that compiling it took, roughly."""
    refusal: str | None = None
    """Why not."""
    final: bool = True
    """It would be the same another time; not so where time ran out."""


READY = b"ready"

encode = msgspec.msgpack.Encoder().encode
decode_table = msgspec.msgpack.Decoder(Table).decode
decode_spec = msgspec.msgpack.Decoder(GrammarSpec).decode
decode_verdict = msgspec.msgpack.Decoder(Verdict).decode


def framed(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message


def write(fd: int, message: bytes) -> None:
    """Write all of it, however long that takes. Raises OSError."""
    left = memoryview(framed(message))
    while left:
        left = left[os.write(fd, left) :]


def read(fd: int, limit: float | None = None) -> bytes:
    """One message. Raises EOFError when the other side is gone, TimeoutError after ``limit`` seconds."""
    deadline = None if limit is None else time.monotonic() + limit
    (length,) = _LENGTH.unpack(_read_exactly(fd, _LENGTH.size, deadline))
    return _read_exactly(fd, length, deadline)


def _read_exactly(fd: int, length: int, deadline: float | None) -> bytes:
    data = bytearray()
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while len(data) < length:
        patience = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        if not poll.poll(patience):
            raise TimeoutError
        part = os.read(fd, min(_CHUNK, length - len(data)))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
