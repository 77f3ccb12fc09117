"""A server that answers as a test scripts it, and short ways to run a plan against it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

import pytest

from slimproc.bench.asks import Asks
from slimproc.bench.drive import Drive
from slimproc.bench.plan import Plan
from slimproc.bench.target import Target

LIMIT = 30.0


class Client:
    """What a handler has of one connection."""

    def __init__(self, writer: asyncio.StreamWriter, number: int) -> None:
        self.number = number
        """Of the request, over all connections, from 0."""
        self._writer = writer

    async def send(self, *parts: bytes) -> None:
        """Each part by itself, as far as a socket keeps them apart."""
        for part in parts:
            self._writer.write(part)
            await self._writer.drain()
            await asyncio.sleep(0)

    async def stream(self, *events: object, done: bool = True) -> None:
        await self.send(head(), *(chunk(event(one)) for one in events))
        if done:
            await self.send(chunk(b"data: [DONE]\n\n"), END)

    async def whole(self, body: object, status: str = "200 OK", more: str = "") -> None:
        data = json.dumps(body).encode()
        await self.send(
            f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n{more}Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )

    def close(self) -> None:
        self._writer.close()


END = b"0\r\n\r\n"
Handler = Callable[[Client, dict], Awaitable[None]]


def head(content_type: str = "text/event-stream; charset=utf-8") -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(data: object) -> bytes:
    return data if isinstance(data, bytes) else b"data: " + json.dumps(data).encode() + b"\n\n"


def said(text: str, finish: str | None = None) -> dict:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def usage(completion: int, prompt: int = 5, cached: int = 0) -> dict:
    counted = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {"choices": [], "usage": counted | {"prompt_tokens_details": {"cached_tokens": cached}}}


class Scripted:
    """``requests`` has the bodies that came, ``running`` how many are being answered, ``most`` how many at once."""

    def __init__(self, handler: Handler, models: tuple[str, ...] = ("m",)) -> None:
        self.handler = handler
        self.models = models
        self.requests: list[dict] = []
        self.heads: list[str] = []
        self.running = self.most = self.port = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                top = (await reader.readuntil(b"\r\n\r\n")).decode()
                if top.startswith("GET"):
                    await Client(writer, -1).whole({"data": [{"id": name} for name in self.models]})
                    continue
                length = int(top.lower().partition("content-length: ")[2].partition("\r\n")[0])
                self.heads.append(top)
                self.requests.append(json.loads(await reader.readexactly(length)))
                self.running += 1
                self.most = max(self.most, self.running)
                try:
                    await self.handler(Client(writer, len(self.requests) - 1), self.requests[-1])
                finally:
                    self.running -= 1
                if writer.is_closing():
                    break
        writer.close()

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def in_thread(self) -> Iterator[Scripted]:
        """For commands, which have a loop of their own."""
        ready, loop = Event(), asyncio.new_event_loop()
        stop = asyncio.Event()

        async def serve() -> None:
            server = await self.start()
            ready.set()
            await stop.wait()
            server.close()

        def work() -> None:
            asyncio.set_event_loop(loop)
            loop.run_until_complete(serve())
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.close()

        thread = Thread(target=work)
        thread.start()
        assert ready.wait(LIMIT)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(LIMIT)
            assert not thread.is_alive()


def drive(handler: Handler, **plan: object) -> tuple[Drive, Scripted]:
    """One plan against one scripted server, in one loop."""

    async def work() -> tuple[Drive, Scripted]:
        scripted = Scripted(handler)
        server = await scripted.start()
        made = Plan(**({"chat": False, "requests": 1, "streams": 1} | plan))
        one = Drive(Target.parse(scripted.url), made, Asks(made, model="m", salt="salt"))
        async with asyncio.timeout(LIMIT):
            await one.run()
        server.close()
        return one, scripted

    return asyncio.run(work())


@pytest.fixture
def sample():
    """What came of the only request that a handler has answered."""

    def one(handler: Handler, **plan: object):
        (found,) = drive(handler, **plan)[0].samples
        return found

    return one
