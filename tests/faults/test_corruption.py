"""An engine whose ring says nonsense: it is killed, and nothing that it wrote is believed after that."""

from __future__ import annotations

import mmap
import random
from pathlib import Path

import psutil
import pytest

from slimproc.ipc.region import HEADER_BYTES
from tests.faults.leftovers import Leftovers
from tests.serving import fake, script, wait_until

pytestmark = pytest.mark.slow

RING_FD = 4
"""In an engine."""


def flip_all(memory: mmap.mmap) -> None:
    """Every bit of every frame."""
    memory[HEADER_BYTES:] = bytes(byte ^ 0xFF for byte in memory[HEADER_BYTES:])


def flip_one_a_frame(memory: mmap.mmap) -> None:
    """One bit in each eight bytes: no frame's checksum is right any more."""
    data = bytearray(memory[HEADER_BYTES:])
    for place in range(0, len(data), 8):
        data[place] ^= 1
    memory[HEADER_BYTES:] = bytes(data)


def noise(memory: mmap.mmap) -> None:
    memory[HEADER_BYTES:] = random.Random(8).randbytes(len(memory) - HEADER_BYTES)


@pytest.mark.parametrize("damage", [flip_all, flip_one_a_frame, noise])
def test_an_engine_whose_ring_is_damaged_is_killed_and_its_stream_told_and_the_next_one_serves(serve, damage):
    server = serve(fake(slots=2, context=1_000_000) | {"log_json": True})
    leftovers = Leftovers(server)
    with server.stream(script(token_latency=0.001), max_tokens=900_000) as stream:
        stream.take(5)
        pid = server.replica()["pid"]
        with Path(f"/proc/{pid}/fd/{RING_FD}").open("r+b", buffering=0) as file, mmap.mmap(file.fileno(), 0) as memory:

            def corrupt() -> bool:
                damage(memory)  # until a frame is hit between being published and being read
                return not psutil.pid_exists(pid) or server.replica()["pid"] != pid

            wait_until(corrupt, "nonsense has been read, and its engine killed")
        *_, error, done = stream.events()
    assert (error["error"]["code"], done) == ("engine_crashed", "[DONE]")
    wait_until(lambda: server.metric("engine_restarts_total", reason="corrupt") == 1, "it counts as corrupt")
    assert server.records("an engine is lost", kind="corrupt")
    assert server.complete(script(tokens=["x"])).text == "x"
    leftovers.assert_none()
