"""The outermost layer, over real sockets: ids, access lines, and an answer in JSON for whatever goes wrong."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from aiohttp import web

from slimproc import errors


def routes(app: web.Application) -> None:
    async def ok(_: web.Request) -> web.Response:
        return web.json_response({"fine": True})

    async def named(request: web.Request) -> web.Response:
        return web.json_response({"id": request.match_info["id"]})

    async def overloaded(_: web.Request) -> web.Response:
        raise errors.Overloaded("the queue is full", retry_after=2.5)

    async def bug(_: web.Request) -> web.Response:
        raise ValueError("secret of /srv/slimproc")

    async def foreign_timeout(_: web.Request) -> web.Response:
        raise TimeoutError

    async def lost_engine(_: web.Request) -> web.Response:
        raise ConnectionResetError("the engine's socket")

    async def teapot(_: web.Request) -> web.Response:
        raise web.HTTPUnprocessableEntity(text="not JSON")

    async def nothing(_: web.Request) -> web.Response:
        return None  # type: ignore[return-value]

    async def moved(_: web.Request) -> web.Response:
        raise web.HTTPFound("/ok")

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        if request.query_string == "bug":
            raise RuntimeError("after the headers")
        if request.query_string == "late":
            raise errors.DeadlineExceeded("after the headers")
        await response.write_eof()
        return response

    app.router.add_get("/ok", ok)
    app.router.add_post("/post", ok)
    app.router.add_put("/post", ok)
    app.router.add_get("/models/{id:(?s:.+)}", named)
    for name in ("overloaded", "bug", "teapot", "nothing", "moved", "stream", "foreign_timeout", "lost_engine"):
        app.router.add_get("/" + name, locals()[name])


def get(path: str, headers: str = "", method: str = "GET", host: str = "x") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{headers}\r\n".encode("latin-1")


def ask(loopback, *requests: bytes):
    """The answers to these requests, sent one after the other on one connection, and the log."""

    async def scenario(server):
        client = await server.connect()
        answers = []
        for request in requests:
            client.send(request)
            answers.append(await client.answer())
        await server.log.wait_lines(len(requests))
        return answers, server.log

    return loopback(routes, scenario)


def test_every_answer_has_an_id_and_every_request_a_line_with_it(loopback):
    answers, log = ask(
        loopback, get("/ok"), get("/nowhere"), get("/ok", method="POST"), get("/overloaded"), get("/bug")
    )
    assert [answer.status for answer in answers] == [200, 404, 405, 503, 500]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 5
    assert [line["request_id"] for line in log.lines] == ids
    assert [line["status"] for line in log.lines] == [200, 404, 405, 503, 500]
    assert [line["method"] for line in log.lines] == ["GET", "GET", "POST", "GET", "GET"]
    assert [line["path"] for line in log.lines] == ["/ok", "/nowhere", "/ok", "/overloaded", "/bug"]
    assert all(line["duration_ms"] >= 0 for line in log.lines)


def test_a_refusals_line_has_the_code_of_its_answer_and_any_other_has_none(loopback):
    answers, log = ask(
        loopback,
        get("/ok"),
        get("/nowhere"),
        get("/ok", method="POST"),
        get("/overloaded"),
        get("/bug"),
        get("/teapot"),
        b"NONSENSE\r\n\r\n",
    )
    codes = [line["code"] for line in log.lines]
    assert codes == [answer.error["code"] if answer.status > 200 else None for answer in answers]
    assert codes[:5] == [None, "not_found", "method_not_allowed", "overloaded", "internal_error"]


def test_on_infer_the_line_has_the_code_that_infer_tells(loopback):
    async def scenario(server):
        client = await server.connect()
        answer = await client.post(b"", path="/infer?model=x")
        return json.loads(answer.body)["code"], await server.log.wait_lines(1)

    async def full(_: web.Request) -> web.Response:
        raise errors.Overloaded("the queue is full")

    code, (line,) = loopback(lambda app: app.router.add_post("/infer", full), scenario)
    assert (line["code"], line["path"]) == (code, "/infer") == ("QUEUE_FULL", "/infer")


@pytest.mark.parametrize(
    "target", ["/ok?model=x&prompt=secret", "/ok#secret", "/ok?#secret?secret", "/no?secret", "http://x/ok?secret"]
)
def test_the_line_has_the_path_without_its_query(loopback, target):
    """What is in the query goes on to a model's server, and may be a prompt."""
    _, log = ask(loopback, get(target))
    assert "secret" not in repr(log.lines)
    assert target.startswith(log.lines[0]["path"])


def test_a_safe_id_of_the_caller_is_kept_and_an_unsafe_one_is_not(loopback):
    (kept, replaced), _ = ask(loopback, get("/ok", "X-Request-Id: my-id_1\r\n"), get("/ok", "X-Request-Id: a b;c\r\n"))
    assert kept.headers["x-request-id"] == "my-id_1"
    assert re.fullmatch(r"[\w.-]+", replaced.headers["x-request-id"])


def test_an_unknown_path_is_404_and_a_wrong_method_405_naming_the_right_ones(loopback):
    (unknown, wrong), _ = ask(loopback, get("/v1/nope"), get("/post", method="DELETE"))
    assert (unknown.status, unknown.error["code"]) == (404, "not_found")
    assert "/v1/nope" in unknown.error["message"]
    assert (wrong.status, wrong.error["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST, PUT"


def test_a_path_of_ten_thousand_characters_is_cut_in_the_line_and_in_the_answer(loopback):
    (answer,), log = ask(loopback, get("/" + "a" * 7000))
    assert answer.status == 404
    assert len(answer.body) < 1200
    assert len(log.lines[0]["path"]) == 200


def test_escapes_in_a_path_stay_escaped_in_the_line(loopback):
    (answer, unknown), log = ask(loopback, get("/models/a%0Ab%2Fc"), get("/no%0Ac"))
    assert json.loads(answer.body) == {"id": "a\nb/c"}
    assert unknown.status == 404
    assert [line["path"] for line in log.lines] == ["/models/a%0Ab%2Fc", "/no%0Ac"]


def test_an_error_of_ours_keeps_its_status_and_headers_and_its_connection(loopback):
    (refused, after), _ = ask(loopback, get("/overloaded"), get("/ok"))
    assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (503, "overloaded", "3")
    assert after.status == 200


@pytest.mark.parametrize("path", ["/bug", "/nothing", "/foreign_timeout", "/lost_engine"])
def test_a_bug_is_500_without_a_word_of_it_and_the_log_has_it_all(loopback, path):
    (answer, after), log = ask(loopback, get(path), get("/ok"))
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert b"secret" not in answer.body
    assert log.failures == [{"event": "a request failed", "request_id": answer.headers["x-request-id"]}]
    assert after.status == 200


def test_aiohttps_other_errors_take_our_shape_and_redirects_stay(loopback):
    (refused, moved), log = ask(loopback, get("/teapot"), get("/moved"))
    assert (refused.status, refused.error["type"]) == (422, "invalid_request_error")
    assert (moved.status, moved.headers["location"]) == (302, "/ok")
    assert [line["status"] for line in log.lines] == [422, 302]


def test_a_stream_has_the_id_too(loopback):
    async def scenario(server):
        client = await server.connect()
        client.send(get("/stream", "x-request-id: s1\r\n"))
        return await client.reader.readuntil(b"0\r\n\r\n")

    assert b"x-request-id: s1\r\n" in loopback(routes, scenario)


@pytest.mark.parametrize("how", ["bug", "late"])
def test_a_failure_after_the_headers_cuts_the_connection_without_an_end_chunk(loopback, how):
    async def scenario(server):
        client = await server.connect()
        client.send(get("/stream?" + how))
        return await client.reader.read(), await server.log.wait_lines(1), server.log.failures

    raw, lines, failures = loopback(routes, scenario)
    assert raw.startswith(b"HTTP/1.1 200 OK\r\n")
    assert raw.endswith(b"data: 1\n\n\r\n")
    assert lines[0]["status"] == 200
    assert len(failures) == 1


def test_a_client_that_leaves_gets_a_499_line_and_no_error(loopback):
    entered = []

    async def forever(request: web.Request) -> web.Response:
        entered.append(request.path)
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async def scenario(server):
        client = await server.connect()
        client.send(get("/forever"))
        await server.wait_until(lambda: entered != [])
        await client.close()
        return await server.log.wait_lines(1), server.log.failures

    lines, failures = loopback(lambda app: app.router.add_get("/forever", forever), scenario)
    assert (lines[0]["status"], lines[0]["path"], failures) == (499, "/forever", [])


@pytest.mark.parametrize("host", ["", "[", "a b", "x:notaport", "http://evil/", "\xff", "x@y:99999999"])
def test_a_hostile_host_header_never_matters(loopback, host):
    """Nothing may read ``request.url``, which is built from it and raises."""
    (answer,), log = ask(loopback, get("/ok", host=host))
    assert answer.status in {200, 400}
    assert log.failures == []


def test_an_error_with_its_body_unread_closes_the_connection(loopback):
    async def scenario(server):
        client = await server.connect()
        client.send(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\nGET /ok HTTP/1.1\r\n\r\n")
        return await client.answer(), await client.is_closed()

    answer, closed = loopback(routes, scenario)
    assert (answer.status, answer.headers["connection"], closed) == (404, "close", True)


# --- what aiohttp refuses before any middleware ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"NONSENSE\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),  # a TLS client on a plain port
        (b"GET /ok HTTP/9.9\r\n\r\n", 400),
        (b"GET /ok HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"POST /post HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /post HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
        (b"POST /post HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", 400),
        (b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /ok HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\nExpect: 200-ok\r\n\r\n", 417),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    ],
)
def test_what_is_no_valid_request_is_refused_in_json_with_an_id(loopback, raw, status):
    async def scenario(server):
        client = await server.connect()
        client.send(raw)
        answer = await client.answer()
        lines = await server.log.wait_lines(1)
        return answer, lines, server.log.failures, await (await server.connect()).post(b"{}", path="/post")

    answer, lines, failures, after = loopback(routes, scenario)
    assert (answer.status, answer.error["type"]) == (status, "invalid_request_error")
    assert (lines[0]["status"], lines[0]["request_id"]) == (status, answer.headers["x-request-id"])
    assert failures == [], "strangers on a port are no errors of ours"
    assert after.status == 200
