"""DisconnectSweeper: sees clients that have gone where aiohttp cannot: while it has paused reading a connection.

A second request that waits in the socket pauses the reading, so neither end-of-file nor reset arrives, and the handler
would run to its end for nobody. The kernel knows: one look at TCP_INFO costs 2 us.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Iterator
from typing import Final

INTERVAL: Final = 0.5
STUCK_LIMIT: Final = 30.0
"""Seconds that a client may take nothing of what waits for it."""

_GONE: Final = frozenset({7, 8})
"""tcp_states.h: TCP_CLOSE and TCP_CLOSE_WAIT. A half-closed connection counts as gone, as it does for aiohttp."""


class _Watch:
    __slots__ = ("stuck_since", "unread")

    def __init__(self) -> None:
        self.unread = 0
        self.stuck_since: float | None = None


class DisconnectSweeper:
    """Aborts the transports of clients that left or do not read; aiohttp then cancels their handlers.

    Costs nothing while no request is in flight.
    """

    def __init__(self) -> None:
        self._watched: dict[asyncio.Transport, _Watch] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def watching(self, transport: asyncio.Transport | None) -> Iterator[None]:
        """Sweep ``transport`` while the block runs."""
        if transport is None:
            yield
            return
        self._watched[transport] = _Watch()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(INTERVAL, self._sweep)
        try:
            yield
        finally:
            self._watched.pop(transport, None)

    def _sweep(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for transport, watch in list(self._watched.items()):
            if not transport.is_closing() and (_has_left(transport) or _is_stuck(transport, watch, now)):
                transport.abort()
        if self._watched:
            self._timer = asyncio.get_running_loop().call_later(INTERVAL, self._sweep)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _has_left(transport: asyncio.Transport) -> bool:
    sock = transport.get_extra_info("socket")
    if sys.platform != "linux" or sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False  # elsewhere aiohttp's own notice has to do
    try:
        return bool(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _GONE)
    except OSError:
        return True


def _is_stuck(transport: asyncio.Transport, watch: _Watch, now: float) -> bool:
    unread = transport.get_write_buffer_size()
    if unread == 0 or unread < watch.unread or watch.stuck_since is None:
        watch.stuck_since = now if unread else None
    watch.unread = unread
    return watch.stuck_since is not None and now - watch.stuck_since >= STUCK_LIMIT
