"""Bodies: how large, how slow, in which encoding, and what Expect is answered."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest
from aiohttp import web

from slimproc.http.body import expect_handler, read_json_body

LIMIT = 1000


def routes(timeout: float = 5.0, rate: float = 65536, entered: list[str] | None = None, limit: int = LIMIT):
    """A route that reads its body and says how long it was and what the bytes were."""

    async def read(request: web.Request) -> web.Response:
        if entered is not None:
            entered.append(request.path)
        body = await read_json_body(request, limit=limit, timeout=timeout, rate=rate)
        return web.json_response({"length": len(body), "text": body[:100].decode("latin-1")})

    def add(app: web.Application) -> None:
        app.router.add_post("/body", read, expect_handler=expect_handler(limit))

    return add


def one_post(loopback: Any, body: bytes, headers: str = "") -> Any:
    async def scenario(server: Any) -> Any:
        return await (await server.connect()).post(body, headers)

    return loopback(routes(), scenario)


def test_a_body_of_the_limit_passes_and_its_connection_serves_the_next(loopback):
    async def scenario(server):
        client = await server.connect()
        first = await client.post(b"x" * LIMIT)
        return first, await client.post(b"{}")

    first, second = loopback(routes(), scenario)
    assert (first.status, json.loads(first.body)["length"]) == (200, LIMIT)
    assert (second.status, json.loads(second.body)["text"]) == (200, "{}")


def test_a_body_of_3_megabytes_passes_where_the_limit_is_4(loopback):
    """aiohttp's own limit of 1 MiB has no say."""

    async def scenario(server):
        return await (await server.connect()).post(b"x" * 3_000_000)

    assert json.loads(loopback(routes(limit=4 << 20), scenario).body)["length"] == 3_000_000


def test_one_byte_more_is_413_by_its_length_alone_and_the_connection_closes(loopback):
    async def scenario(server):
        client = await server.connect()
        client.send(f"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: {LIMIT + 1}\r\n\r\n".encode())
        return await client.answer(), await client.is_closed()

    answer, closed = loopback(routes(), scenario)
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")
    assert answer.headers["connection"] == "close"
    assert closed


def test_a_chunked_body_over_the_limit_is_413_while_it_is_read(loopback):
    async def scenario(server):
        client = await server.connect()
        client.send(b"POST /body HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        client.send(b"3e9\r\n" + b"x" * 1001 + b"\r\n")
        answer = await client.answer()
        client.send(b"0\r\n\r\nPOST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        return answer, await client.is_closed()

    answer, closed = loopback(routes(), scenario)
    assert (answer.status, answer.error["type"]) == (413, "invalid_request_error")
    assert closed, "what follows a refused body is never taken for a request"


def test_a_chunked_body_within_the_limit_is_joined(loopback):
    async def scenario(server):
        client = await server.connect()
        client.send(b'POST /body HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{"\r\n')
        client.send(b'4\r\na":1\r\n1\r\n}\r\n0\r\n\r\n')
        return await client.answer()

    assert json.loads(loopback(routes(), scenario).body)["text"] == '{"a":1}'


def test_a_body_that_stops_arriving_is_408_and_the_connection_closes(loopback):
    async def scenario(server):
        client = await server.connect()
        client.send(b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        return await client.answer(), await client.is_closed()

    answer, closed = loopback(routes(timeout=0.05), scenario)
    assert (answer.status, answer.error["code"]) == (408, "request_timeout")
    assert answer.headers["connection"] == "close"
    assert closed


def test_a_trickling_body_does_not_buy_more_time_than_its_bytes_are_worth(loopback):
    async def scenario(server):
        client = await server.connect()
        client.send(b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n")

        async def trickle():
            while True:
                client.send(b"x")
                await asyncio.sleep(0.01)

        task = asyncio.create_task(trickle())
        answer = await client.answer()
        task.cancel()
        return answer

    assert loopback(routes(timeout=0.1), scenario).status == 408


def test_bytes_that_arrive_buy_time(loopback):
    """At 10 bytes/s, 100 bytes are worth 10 s. The pause is the thing tested: longer than the 50 ms without them."""

    async def scenario(server):
        client = await server.connect()
        client.send(b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 101\r\n\r\n" + b"x" * 100)
        await asyncio.sleep(0.2)
        client.send(b"x")
        return await client.answer()

    assert loopback(routes(timeout=0.05, rate=10), scenario).status == 200


def test_a_client_that_closes_in_mid_body_is_a_disconnect_and_no_error(loopback):
    async def scenario(server):
        client = await server.connect()
        client.send(b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n12345")
        await server.wait_until(lambda: entered != [])
        await client.close()
        await server.log.wait_lines(1)
        return server.log, await (await server.connect()).post(b"{}")

    entered: list[str] = []
    log, after = loopback(routes(entered=entered), scenario)
    assert log.lines[0]["status"] == 499
    assert log.failures == []
    assert after.status == 200


def test_broken_chunks_are_400(loopback):
    async def scenario(server):
        client = await server.connect()
        client.send(b"POST /body HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n")
        return await client.answer(), await client.is_closed()

    answer, closed = loopback(routes(), scenario)
    assert (answer.status, answer.error["type"], closed) == (400, "invalid_request_error", True)


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "Content-Type: application/x-www-form-urlencoded\r\n",
        "Content-Type: text/plain\r\n",
        "Content-Type: application/json; charset=utf-8\r\n",
        'Content-Type: application/json; charset="UTF-8"\r\n',
        "Content-Type: ;;;=\r\n",
        "Content-Encoding: identity\r\n",
    ],
)
def test_whatever_the_type_says_the_body_is_read(loopback, content_type):
    assert one_post(loopback, b'{"a":1}', content_type).status == 200


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ("{}".encode("utf-16"), "Content-Type: application/json; charset=utf-16\r\n"),
        (b"{}", "Content-Type: application/json; charset=latin-1\r\n"),
        (b"--x--", "Content-Type: multipart/form-data; boundary=x\r\n"),
        (gzip.compress(b"{}", mtime=0), "Content-Encoding: gzip\r\n"),
        (b"{}", "Content-Encoding: identity, br\r\n"),
        (b"{}", "Content-Encoding: identity\r\nContent-Encoding: deflate\r\n"),
    ],
)
def test_what_says_that_it_is_no_plain_json_is_415(loopback, body, headers):
    answer = one_post(loopback, body, headers)
    assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")


def test_a_byte_order_mark_is_dropped(loopback):
    assert json.loads(one_post(loopback, b"\xef\xbb\xbf{}").body)["text"] == "{}"


def test_no_body_at_all_is_read_as_empty(loopback):
    async def scenario(server):
        client = await server.connect()
        client.send(b"POST /body HTTP/1.1\r\nHost: x\r\n\r\n")
        return await client.answer()

    assert json.loads(loopback(routes(), scenario).body)["length"] == 0


# --- Expect --------------------------------------------------------------------------------------------------


def expecting(expect: str, length: int, path: str = "/body", version: str = "1.1") -> bytes:
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Length: {length}\r\nExpect: {expect}\r\n"
    return (head + "Connection: keep-alive\r\n\r\n").encode()


def test_100_continue_comes_before_the_body_and_the_answer_after_it(loopback):
    async def scenario(server):
        client = await server.connect()
        client.send(expecting("100-Continue", 2))
        interim = await client.reader.readuntil(b"\r\n\r\n")
        client.send(b"{}")
        return interim, await client.answer(), await client.post(b"{}")

    interim, answer, after = loopback(routes(), scenario)
    assert interim == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert (answer.status, after.status) == (200, 200)


@pytest.mark.parametrize(
    ("expect", "length", "path", "status"),
    [
        ("100-continue", LIMIT + 1, "/body", 413),
        ("200-ok", 2, "/body", 417),
        ("200-ok", 2, "/nowhere", 417),
        ("100-continue", 100_000_000, "/nowhere", 413),
    ],
)
def test_what_cannot_be_met_is_refused_without_a_100(loopback, expect, length, path, status):
    async def scenario(server):
        client = await server.connect()
        client.send(expecting(expect, length, path))
        answer = await client.answer()
        return answer, await client.is_closed(), await server.log.wait_lines(1)

    answer, closed, lines = loopback(routes(), scenario)
    assert answer.status == status
    assert answer.error["type"] == "invalid_request_error"
    assert answer.headers["x-request-id"] == lines[0]["request_id"]
    assert closed


def test_an_http_1_0_client_is_not_told_to_continue(loopback):
    async def scenario(server):
        client = await server.connect()
        client.send(expecting("100-continue", 2, version="1.0") + b"{}")
        return await client.answer()

    assert loopback(routes(), scenario).status == 200
