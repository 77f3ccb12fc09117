"""A server on the loopback with the product's middleware and runner, and a client that speaks raw bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import uvloop
from aiohttp import web

from slimproc.http import middleware, protocol

LIMIT = 10.0
"""Seconds for a scenario."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        assert self.headers["content-type"].startswith("application/json"), self
        assert list(json.loads(self.body)) == ["error"]
        return json.loads(self.body)["error"]


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> Answer:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        headers = {key.lower(): value for key, value in (line.split(": ", 1) for line in lines)}
        body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return Answer(int(first.split()[1]), headers, body)

    async def post(self, body: bytes, headers: str = "", path: str = "/body") -> Answer:
        self.send(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body)
        return await self.answer()

    async def is_closed(self) -> bool:
        return await self.reader.read() == b""

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT):
        while not condition():  # noqa: ASYNC110 - the condition is the product's, which has no event for us
            await asyncio.sleep(0.002)


class RecordedLog:
    """Stands where the access log's logger stands."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.failures: list[dict[str, Any]] = []

    def info(self, event: str, **fields: Any) -> None:
        self.lines.append({"event": event} | fields)

    def exception(self, event: str, **fields: Any) -> None:
        self.failures.append({"event": event} | fields)

    async def wait_lines(self, count: int) -> list[dict[str, Any]]:
        await wait_until(lambda: len(self.lines) >= count)
        return self.lines


class Loopback:
    """What a scenario is given."""

    def __init__(self, port: int, log: RecordedLog) -> None:
        self.port, self.log = port, log
        self._clients: list[RawClient] = []

    async def connect(self) -> RawClient:
        client = RawClient(*await asyncio.open_connection("127.0.0.1", self.port))
        self._clients.append(client)
        return client

    wait_until = staticmethod(wait_until)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


Scenario = Callable[[Loopback], Awaitable[Any]]


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``loopback(routes, scenario)``: serve what ``routes(app)`` adds, run ``scenario(server)``, return what it does."""
    log = RecordedLog()
    monkeypatch.setattr(middleware, "log", log)
    monkeypatch.setattr(protocol, "log", log)

    async def main(routes: Callable[[web.Application], None], scenario: Scenario, body_limit: int) -> Any:
        app = web.Application()
        routes(app)
        middleware.install(app, body_limit=body_limit)
        runner = protocol.JsonAppRunner(app, lingering_time=0.2)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server = Loopback(runner.addresses[0][1], log)
        try:
            async with asyncio.timeout(LIMIT):
                return await scenario(server)
        finally:
            await server.close()
            await runner.cleanup()

    def run(routes: Callable[[web.Application], None], scenario: Scenario, *, body_limit: int = 1000) -> Any:
        return uvloop.run(main(routes, scenario, body_limit))

    return run
