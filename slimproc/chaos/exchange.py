"""One request on a connection of its own, and every byte that came back."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from dataclasses import dataclass

from slimproc.chaos.asking import request_of
from slimproc.chaos.schedule import Ask

_RESET = struct.pack("ii", 1, 0)
_SMALL_BUFFER = 4096


@dataclass
class Heard:
    """``data``: everything that came. Instants are monotonic seconds."""

    ask: Ask
    sent: float
    ended: float = 0.0
    first: float = 0.0
    data: bytes = b""
    how: str = ""
    """``closed`` by the server, ``left`` by us, ``reset`` by the server, ``unconnected``, or ``lost``: nothing more came."""


async def exchange(ask: Ask, host: str, port: int, limit: float) -> Heard:
    """Raises nothing: whatever goes wrong is how it ended. ``limit``: seconds after which it counts as lost."""
    heard = Heard(ask, time.monotonic())
    sock = socket.socket()
    sock.setblocking(False)
    if ask.slow:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
    try:
        await _converse(sock, heard, (host, port), limit)
    except TimeoutError:
        heard.how = "lost"
    except ConnectionError:
        heard.how = "reset" if heard.how == "connected" else "unconnected"
    except OSError:
        heard.how = "unconnected"
    finally:
        heard.ended = time.monotonic()
        if heard.how == "left" and ask.leave == "reset":
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        sock.close()
    return heard


async def _converse(sock: socket.socket, heard: Heard, address: tuple[str, int], limit: float) -> None:
    ask, loop = heard.ask, asyncio.get_running_loop()
    async with asyncio.timeout(limit):
        await loop.sock_connect(sock, address)
        heard.how = "connected"
        heard.sent = time.monotonic()
        await loop.sock_sendall(sock, request_of(ask, f"{address[0]}:{address[1]}"))
        if not ask.leave:
            await asyncio.sleep(ask.slow)
            await _read(sock, heard)
            return
        try:
            async with asyncio.timeout(ask.leave_after):
                await _read(sock, heard)
        except TimeoutError:
            heard.how = "left"


async def _read(sock: socket.socket, heard: Heard) -> None:
    loop = asyncio.get_running_loop()
    while True:
        piece = await loop.sock_recv(sock, 65536)
        if not piece:
            heard.how = "closed"
            return
        heard.first = heard.first or time.monotonic()
        heard.data += piece
