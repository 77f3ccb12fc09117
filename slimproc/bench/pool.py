"""Pool: the connections to one server, kept open between requests as a client library does."""

from __future__ import annotations

import asyncio
import os
import ssl
from time import perf_counter
from typing import Any

from slimproc.bench.exchange import Answer, Connection
from slimproc.bench.failures import Unreachable
from slimproc.bench.target import Target


class ConnectFailed(Exception):
    """No connection could be made; the message says why, in few words."""


class Pool:
    def __init__(self, target: Target) -> None:
        self._target = target
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self.contact = 0.0
        """When (``perf_counter``) a connection was last made or an answer last came."""
        self._tls = ssl.create_default_context() if target.tls else None

    async def ask(self, request: bytes, leave_after: int | None = None) -> Answer:
        """Raises ConnectFailed. A request that a kept connection did not take is sent again on a new one: the server
        may just have closed that.
        """
        while True:
            connection = await self._take()
            again = connection.used
            try:
                answer = await connection.ask(request, leave_after)
            except asyncio.CancelledError:
                connection.close()
                raise
            finally:
                self._give_back(connection)
            if not (again and answer.fault and not answer.head.status):
                self.contact = answer.ended
                return answer

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            self._all.discard(connection)
        options: dict[str, Any] = {"ssl": self._tls} if self._tls else {}
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(Connection, self._target.host, self._target.port, **options)
        except OSError as error:
            raise ConnectFailed(_cause(error)) from None
        self.contact = perf_counter()
        self._all.add(connection)
        return connection

    def _give_back(self, connection: Connection) -> None:
        if connection.usable:
            self._idle.append(connection)
        else:
            self._all.discard(connection)

    def close(self) -> None:
        for connection in self._all:
            connection.close()
        self._all.clear()
        self._idle.clear()


def _cause(error: OSError) -> str:
    """In the system's words, since loops put it in different ones."""
    known = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror
    return (known or str(error) or type(error).__name__).lower()


async def look(target: Target, limit: float) -> Answer:
    """The answer to ``GET /v1/models``: whether anybody is there at all. Raises Unreachable."""
    pool = Pool(target)
    try:
        async with asyncio.timeout(limit):
            answer = await pool.ask(target.get("/v1/models"))
    except TimeoutError:
        raise Unreachable(f"{target.url} does not answer within {limit:g} seconds") from None
    except ConnectFailed as error:
        raise Unreachable(f"no server answers at {target.url}: {error}") from None
    finally:
        pool.close()
    if answer.fault:
        raise Unreachable(f"{target.url}: {answer.fault}")
    return answer
