"""Control questions to hostile servers: whatever they do, an answer or a reason comes within the limit, in bounded memory."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from slimproc.upstream.client import LARGEST_ANSWER, ControlClient, UpstreamClient
from slimproc.upstream.contract import ContractViolated, ControlError, NoAnswer, Unreachable
from tests.fakes import looped
from tests.upstream.harness_upstream import closed_port
from tests.upstream.standin import StandIn

GOOD = b'{"state": "ready", "residency": "resident", "active_requests": 0, "last_error": null}'
Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(behave: Behaviour, heard: list[bytes] | None = None) -> AsyncIterator[str]:
    """A server that reads a request's head (``heard``) and then does as it is told; its base URL."""

    connections: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
                if heard is not None:
                    heard.append(head)
                await behave(reader, writer)
            finally:
                writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections)


async def ask(url: str, *, limit: float = 20.0) -> ControlError | None:
    """The error that asking for its status comes to."""
    async with UpstreamClient() as client:
        try:
            await ControlClient(client, url, status_timeout=limit).status()
        except ControlError as error:
            return error
    return None


def answering(data: bytes) -> Behaviour:
    async def behave(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return behave


def http(body: bytes, *, status: str = "200 OK", headers: bytes = b"") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n".encode()
    return head + headers + b"\r\n" + body


@looped
async def test_a_good_answer_is_read_whatever_it_says_of_its_type():
    async with serving(answering(http(GOOD, headers=b"Content-Type: text/plain\r\n"))) as url:
        assert await ask(url) is None


@looped
async def test_nobody_there_is_told_from_somebody_silent():
    assert isinstance(await ask(f"http://127.0.0.1:{closed_port()}"), Unreachable)

    async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serving(silent) as url:
        error = await ask(url, limit=0.1)
        assert isinstance(error, NoAnswer)
        assert "within 0.1 s" in error.reason


@looped
async def test_a_slow_drip_ends_at_the_limit():
    async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.01)

    async with serving(drip) as url:
        assert isinstance(await ask(url, limit=0.2), NoAnswer)


@pytest.mark.parametrize("chunked", [False, True])
@looped
async def test_an_endless_answer_is_cut_at_its_limit(chunked):
    sent = 0

    async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        how = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 9999999999"
        writer.write(b"HTTP/1.1 200 OK\r\n" + how + b"\r\n\r\n")
        piece = b" " * 65536
        while True:
            writer.write(b"10000\r\n" + piece + b"\r\n" if chunked else piece)
            await writer.drain()
            sent += len(piece)

    async with serving(flood) as url:
        error = await ask(url)
        assert isinstance(error, ContractViolated)
        assert str(LARGEST_ANSWER) in error.reason
    assert sent < 32 << 20


@looped
async def test_nothing_is_decompressed_neither_a_bomb_nor_what_would_be_good():
    for data in (b" " * (16 << 20), GOOD):
        compressed = http(gzip.compress(data), headers=b"Content-Encoding: gzip\r\n")
        async with serving(answering(compressed)) as url:
            error = await ask(url)
            assert isinstance(error, ContractViolated)
            assert "larger" not in error.reason


@looped
async def test_a_redirect_is_not_followed():
    async with StandIn(state="ready") as good:
        where = f"Location: {good.url}/control/status\r\n".encode()
        async with serving(answering(http(b"", status="302 Found", headers=where))) as url:
            error = await ask(url)
        assert isinstance(error, ContractViolated)
        assert "302" in error.reason
        assert good.counts.statuses == 0


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", NoAnswer),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{", NoAnswer),
        (b"SSH-2.0-OpenSSH_9.6\r\n", ContractViolated),
        (b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\n", ContractViolated),
        (http(b"hello"), ContractViolated),
        (http(GOOD, status="500 No"), ContractViolated),
        (http(GOOD[:-1]), ContractViolated),
    ],
    ids=["closed", "half", "another protocol", "a huge header", "text", "good but 500", "cut"],
)
@looped
async def test_every_other_misfortune_has_its_reason(data, kind):
    async with serving(answering(data)) as url:
        error = await ask(url)
        assert isinstance(error, kind), error
        assert error.reason


@looped
async def test_a_server_that_stops_sending_and_keeps_its_ear_open_is_given_up():
    async def half_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{")
        writer.write_eof()
        await reader.read()

    async with serving(half_close) as url:
        began = time.monotonic()
        assert isinstance(await ask(url), NoAnswer)
        assert time.monotonic() - began < 20


@looped
async def test_no_proxy_is_taken_from_the_environment(monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{closed_port()}")
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{closed_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    async with serving(answering(http(GOOD))) as url:
        assert await ask(url) is None


@looped
async def test_a_cookie_is_not_sent_back():
    heard: list[bytes] = []

    async def bake(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(http(GOOD, headers=b"Set-Cookie: a=b\r\n"))
        await writer.drain()

    async with serving(bake, heard) as url, UpstreamClient() as client:
        control = ControlClient(client, url, status_timeout=20)
        await control.status()
        await control.unload(20)
    assert len(heard) == 2
    assert b"cookie" not in heard[1].lower()
    assert heard[0].startswith(b"GET /control/status ")
    assert heard[1].startswith(b"POST /control/unload ")
    assert b"content-type: application/json" in heard[1].lower()
