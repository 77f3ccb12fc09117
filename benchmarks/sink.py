"""A server that takes a body of any length and answers 1 kB: the upstream of the pass-through benchmark. Raw uvloop.

python benchmarks/sink.py
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import cast

import uvloop

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: 1024\r\n\r\n" + b"x" * 1024
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)


class Sink(asyncio.Protocol):
    """One request after another. A chunked body ends with its last five bytes, which no byte of ours can look like."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class
        self._head = b""
        self._left: int | None = None
        self._tail = b""

    def data_received(self, data: bytes) -> None:
        if self._left is None:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            self._head = b""
            length = _LENGTH.search(head)
            self._left = int(length[1]) if length else (-1 if _CHUNKED.search(head) else 0)
        if self._left < 0:
            self._tail = (self._tail + data)[-5:]
            if self._tail != b"0\r\n\r\n":
                return
        else:
            self._left -= len(data)
            if self._left > 0:
                return
        self._left, self._tail = None, b""
        self._transport.write(ANSWER)


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(Sink, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    sys.exit(uvloop.run(serve()))
