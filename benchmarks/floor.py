"""The floor: a bare uvloop server that writes prebuilt bytes, the same that slimproc would make, and does nothing else.

    python benchmarks/floor.py [--streams 32] [--tokens 40000] [--per-write 16] [--every 0]

It answers when ``--streams`` requests are there, all at once, with as many tokens as each asks for (``max_tokens``, up
to ``--tokens``). It prints its port and serves until it is terminated.
"""

from __future__ import annotations

import argparse
import asyncio
import re

import uvloop
from events import HEAD, end_chunks, token_chunks
from stepper import Stepper

JOINED_MAX_UNREAD = 1 << 16
"""Bytes. Joined writes may be joined further where a client is slow, as any server's are."""
_MAX_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')


class Floor:
    """What all connections of a round share."""

    def __init__(self, streams: int, tokens: int, per_write: int, every: float) -> None:
        self._per_write = per_write
        self._chunks = token_chunks(tokens, per_write)
        self._end = end_chunks()
        self._transports: list[asyncio.Transport] = []
        self._steps = 0
        joined = {"max_unread": JOINED_MAX_UNREAD, "check_every": 1} if per_write > 1 else {}
        self._stepper = Stepper(streams, step=self._step, unread=self._unread, every=every, **joined)

    def answer(self, transport: asyncio.Transport, tokens: int) -> None:
        assert tokens % self._per_write == 0, "an answer is a whole number of writes"
        transport.write(HEAD)
        self._transports.append(transport)
        self._steps = tokens // self._per_write
        self._stepper.join(self._steps)

    def _step(self, number: int) -> None:
        chunk = self._chunks[number]
        for transport in self._transports:
            transport.write(chunk)
        if number == self._steps - 1:
            done, self._transports = self._transports, []
            for transport in done:
                transport.write(self._end)

    def _unread(self) -> int:
        return max(transport.get_write_buffer_size() for transport in self._transports)


class Connection(asyncio.Protocol):
    """A request comes in one piece: it is small, and the client sends it with one call."""

    def __init__(self, floor: Floor) -> None:
        self._floor = floor

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        found = _MAX_TOKENS.search(data)
        if found:
            self._floor.answer(self._transport, int(found[1]))
        else:  # which models there are, say
            self._transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")


async def serve(streams: int, tokens: int, per_write: int, every: float) -> None:
    floor = Floor(streams, tokens, per_write, every)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(floor), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=40_000, help="the longest answer")
    parser.add_argument("--per-write", type=int, default=16)
    parser.add_argument("--every", type=float, default=0.0, help="seconds between two steps; 0: flat out")
    options = parser.parse_args()
    uvloop.run(serve(options.streams, options.tokens, options.per_write, options.every))


if __name__ == "__main__":
    main()
