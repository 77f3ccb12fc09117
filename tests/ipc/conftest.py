"""A ring with both of its ends in this process, and a way to run the writer in another one."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator

import pytest

from slimproc.ipc.credit import CreditPair, create_credit
from slimproc.ipc.region import MIN_CAPACITY, create_region
from slimproc.ipc.ring import RingReader, RingWriter

EPOCH = 7

CREDITS = [
    pytest.param("eventfd", marks=pytest.mark.skipif(not hasattr(os, "eventfd"), reason="Linux only")),
    "pipe",
]


class Ring:
    """``writer`` and ``reader`` of one region."""

    def __init__(self, credit: str, capacity: int = MIN_CAPACITY, *, crc: bool = True) -> None:
        self.capacity = capacity
        self.data: CreditPair = create_credit(credit)
        self.space: CreditPair = create_credit(credit)
        self.fd = create_region(capacity, epoch=EPOCH, replica=0, credit=credit, crc=crc)
        self.reader = RingReader(self.fd, self.data.reader, self.space.writer, epoch=EPOCH)
        self.writer = RingWriter(self.fd, self.data.writer, self.space.reader)

    def read(self) -> list[tuple[int, bytes]]:
        """All frames that are credited now."""
        frames: list[tuple[int, bytes]] = []
        while self.reader.drain(lambda kind, payload, _alone: frames.append((kind, bytes(payload)))):
            pass
        return frames

    def close(self) -> None:
        self.reader.close()
        self.writer.close()
        self.data.close()
        self.space.close()
        os.close(self.fd)


@pytest.fixture(params=CREDITS)
def credit(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_ring(credit: str) -> Iterator[Callable[..., Ring]]:
    made: list[Ring] = []

    def make(*args, **kwargs) -> Ring:
        made.append(Ring(credit, *args, **kwargs))
        return made[-1]

    yield make
    for ring in made:
        ring.close()


@pytest.fixture
def ring(make_ring: Callable[..., Ring]) -> Ring:
    return make_ring()


def in_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked process, which exits 0 when it returns and 1 when it raises. Returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001  # a forked child must never return into pytest
        traceback.print_exc()
    finally:
        os._exit(code)
