"""PooledSequence: a text of which only a vector or a rank is wanted, and how that goes out through the ring."""

from __future__ import annotations

from collections.abc import Iterator

from slimproc.engines.sequence import Sequence
from slimproc.ipc import wire
from slimproc.request import Usage

_FRAME_REST = 128
"""An upper bound on what an ``Embedded`` needs beside its vector, in bytes."""


class PooledSequence(Sequence):
    """A sequence that generates nothing: its tokens are read once, and it ends with their vector."""

    __slots__ = ("dimensions", "query")

    def __init__(self, command: wire.Embed, prompt: list[int], context: int) -> None:
        super().__init__(wire.Submit(rid=command.rid, prompt=command.prompt, max_tokens=0), prompt, context)
        self.query = command.query
        """Not None: the rank of the text as an answer to it is wanted. ``prompt`` has both."""
        self.dimensions = command.dimensions
        """Values of the vector; None: all that the model gives."""


def frames(sequence: PooledSequence, vector: bytes, largest: int) -> Iterator[wire.Embedded]:
    """The terminal event of ``sequence``, in as many parts as frames of ``largest`` bytes need."""
    room = largest - _FRAME_REST
    last = max(0, len(vector) - 1) // room * room
    for start in range(0, last, room):
        yield wire.Embedded(sequence.rid, vector[start : start + room])
    yield wire.Embedded(sequence.rid, vector[last:], Usage(len(sequence.prompt)))
