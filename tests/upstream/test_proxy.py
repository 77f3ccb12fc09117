"""The forwarder by itself: which headers go on, what a broken upstream becomes, and that connections end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from slimproc.errors import BackendFailed
from slimproc.upstream.proxy import Forwarder, Unreachable, end_to_end, request_headers
from tests.fakes import eventually, looped


def headers(*pairs: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(pairs))


def test_headers_of_one_connection_stay_there_and_the_rest_keeps_its_order():
    given = headers(
        ("Set-Cookie", "a=1"),
        ("Connection", "close, X-Hop , te"),
        ("X-Hop", "1"),
        ("Keep-Alive", "5"),
        ("TE", "trailers"),
        ("Trailer", "X"),
        ("Upgrade", "h2c"),
        ("Proxy-Authenticate", "x"),
        ("X-Own", "2"),
        ("set-cookie", "b=2"),
    )
    assert end_to_end(given) == [("Set-Cookie", "a=1"), ("X-Own", "2"), ("set-cookie", "b=2")]


def test_a_length_beside_chunks_is_not_passed_on():
    """It does not count, and whoever believed it would cut the body elsewhere."""
    given = headers(("Transfer-Encoding", "chunked"), ("Content-Length", "5"), ("Content-Type", "x"))
    assert end_to_end(given) == [("Content-Type", "x")]


def test_a_request_gets_our_id_and_loses_host_and_expectation():
    given = headers(("Host", "front"), ("Expect", "100-continue"), ("X-Request-Id", "theirs"), ("Accept", "*/*"))
    assert request_headers(given, "ours") == [("Accept", "*/*"), ("X-Request-Id", "ours")]


class Server:
    """``connections`` counts those that were made; ``gone`` those that the forwarder has closed."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/path"
        self.connections = 0
        self.gone = 0


Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(behaviour: Behaviour) -> AsyncIterator[tuple[Server, Forwarder]]:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await behaviour(reader, writer)
            while await reader.read(1 << 16):
                pass
        server.gone += 1
        writer.close()

    listening = await asyncio.start_server(connected, "127.0.0.1", 0)
    server = Server(listening.sockets[0].getsockname()[1])
    forwarder = Forwarder()
    try:
        yield server, forwarder
    finally:
        await forwarder.close()
        listening.close()


async def whole(forwarder: Forwarder, url: str, body: bytes = b"") -> bytes:
    answer = await forwarder.send(url, [("X-Own", "1")], body)
    try:
        found = b""
        while piece := await answer.read():
            found += piece
        return found
    finally:
        answer.close()


@looped
async def test_a_connection_is_used_again():
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with serving(answer) as (server, forwarder):
        assert [await whole(forwarder, server.url) for _ in range(2)] == [b"ok", b"ok"]
        assert server.connections == 1


@looped
async def test_closing_an_answer_that_goes_on_ends_its_connection():
    async def go_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")

    async with serving(go_on) as (server, forwarder):
        answer = await forwarder.send(server.url, [], b"")
        assert await answer.read() == b"one"
        answer.close()
        await eventually(lambda: server.gone == 1, "the connection is closed")


@looped
async def test_a_cancelled_request_ends_its_connection():
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")

    async with serving(silent) as (server, forwarder):
        waiting = asyncio.ensure_future(forwarder.send(server.url, [], b""))
        await eventually(lambda: server.connections, "it is connected")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await eventually(lambda: server.gone == 1, "the connection is closed")


@pytest.mark.parametrize(
    "rest", [b"", b"zz\r\n", b"-1\r\n", b"3\r\noneX"], ids=["end", "nonsense", "negative", "no line end"]
)
@looped
async def test_chunks_that_are_none_are_told_to_whoever_reads(rest):
    told = asyncio.Event()

    async def fail(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        await told.wait()
        writer.write(rest)
        writer.write_eof()

    async with serving(fail) as (server, forwarder):
        answer = await forwarder.send(server.url, [], b"")
        assert await answer.read() == b"one"
        told.set()

        async def read_on() -> None:
            while await answer.read():
                pass

        with pytest.raises(BackendFailed):
            await asyncio.wait_for(read_on(), 10)
        answer.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"a secret HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na secret header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\na secret\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\na secret",
        b"",
    ],
    ids=["status", "header", "chunk", "length", "nothing"],
)
@looped
async def test_the_log_says_that_an_upstream_broke_off_and_quotes_neither_the_query_nor_the_answer(answer, caplog):
    async def fail(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.write_eof()

    async with serving(fail) as (server, forwarder):
        with pytest.raises(BackendFailed):
            await asyncio.wait_for(whole(forwarder, server.url + "?prompt=secret"), 10)
    (record,) = caplog.records
    assert record.message == "an upstream broke off"
    assert record.fields["reason"]
    assert "secret" not in repr(record.fields)


@looped
async def test_redirects_and_cookies_are_not_ours_to_follow():
    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            seen.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 307 Go\r\nLocation: /elsewhere\r\nSet-Cookie: a=1\r\nContent-Length: 0\r\n\r\n")

    seen: list[bytes] = []
    async with serving(redirect) as (server, forwarder):
        for _ in range(2):
            answer = await forwarder.send(server.url, [], b"")
            assert answer.status == 307
            assert await answer.read() == b""
            answer.close()
        assert len(seen) == 2
        assert not any(b"ookie" in head or b"elsewhere" in head for head in seen)
        assert not any(name in head.lower() for head in seen for name in (b"user-agent", b"accept", b"content-type"))


@looped
async def test_nobody_there_is_unreachable_and_takes_nothing_of_the_body():
    taken: list[int] = []

    async def body() -> AsyncIterator[bytes]:
        taken.append(1)
        yield b"x"

    forwarder = Forwarder()
    with pytest.raises(Unreachable):
        await forwarder.send("http://127.0.0.1:1/", [], body())
    assert not taken
    await forwarder.close()
