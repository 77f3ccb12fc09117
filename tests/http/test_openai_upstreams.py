"""OpenAI's routes for models that upstreams serve: by the body's ``model``, and the body as it is."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.fakes import eventually, looped
from tests.http.relays import OK, Connection, Front, answer_ok

ROUTES = ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/rerank", "/tokenize", "/detokenize"]

MODELS = {"asr": {"aliases": ("gpt",)}, "echo": {"backend": "fake"}}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("name", ["asr", "gpt"])
@looped
async def test_the_body_goes_unchanged_to_the_same_path(tmp_path, path, name):
    body = b' { "tools": [{"x": 1}],  "model" : "%s", "unknown": null }\n' % name.encode()
    seen = []

    async def take(connection: Connection) -> None:
        await connection.head()
        seen.append(await connection.body())
        connection.send(OK)

    async with Front(tmp_path, MODELS, behaviour=take) as front:
        answer = await front.ask(
            body, target=path + "?a=%41", headers="Content-Type: application/json\r\n" + _length(body)
        )
        assert (answer.status, answer.body) == (200, b"ok")
        assert seen == [body]
        assert front.upstream.connections[0].line == f"POST {path}?a=%41 HTTP/1.1".encode()
        await front.wait_free()
        assert front.outcomes() == {"ok": 1}


def _length(body: bytes) -> str:
    return f"Content-Length: {len(body)}\r\n"


@looped
async def test_a_local_model_beside_it_is_served_here(tmp_path):
    async with Front(tmp_path, MODELS) as front:
        client = await front.begin(b'{"model": "echo", "prompt": "hi"}', target="/v1/completions")
        engine = front.replicas[-1].engine
        await eventually(lambda: engine.submits, "it has started")
        engine.finish(1)
        assert (await client.answer()).status == 200
        assert not front.upstream.connections


@looped
async def test_events_pass_through_as_they_come(tmp_path):
    told = asyncio.Event()

    async def stream(connection: Connection) -> None:
        await connection.head()
        await connection.body()
        connection.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection.send(b"9\r\ndata: 1\n\n\r\n")
        await told.wait()
        connection.send(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    async with Front(tmp_path, MODELS, behaviour=stream) as front:
        client = await front.begin(b'{"model": "asr", "stream": true}', target="/v1/chat/completions")
        assert b"text/event-stream" in await client.reader.readuntil(b"data: 1\n\n")
        told.set()
        assert await client.reader.readuntil(b"0\r\n\r\n")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b'{"model": "nope"}', 404, "model_not_found"),
        (b"{}", 400, "invalid_request_error"),
        (b'{"model": 5}', 400, "invalid_request_error"),
        (b'{"model": "asr", "model": "echo"}', 400, "invalid_request_error"),
        (b'["asr"]', 400, "invalid_request_error"),
        (b'{"model": "asr"', 400, "invalid_request_error"),
        (b"", 400, "invalid_request_error"),
        (b"\xff\xfe", 400, "invalid_request_error"),
        (b"[" * 100_000, 400, "invalid_request_error"),
    ],
    ids=lambda value: repr(value)[:30],
)
@looped
async def test_a_body_that_names_no_model_is_refused_in_openais_shape(tmp_path, body, status, code):
    async with Front(tmp_path, MODELS) as front:
        answer = await front.ask(body, target="/v1/chat/completions")
        assert (answer.status, answer.error["code"]) == (status, code)
        assert not front.upstream.connections


@looped
async def test_the_models_own_limit_of_a_body_holds_here_too(tmp_path):
    async with Front(tmp_path, {"asr": {"max_body": 20}}) as front:
        answer = await front.ask(b'{"model": "asr", "x": "yyyyyyyyyyy"}', target="/v1/chat/completions")
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")


@looped
async def test_failures_have_openais_shape(tmp_path):
    async def die(connection: Connection) -> None:
        await connection.head()
        connection.reset()

    async with Front(tmp_path, MODELS, behaviour=die) as front:
        answer = await front.ask(b'{"model": "asr"}', target="/v1/completions")
        assert (answer.status, answer.error["code"]) == (502, "bad_gateway")
        front.upstream.behaviour = answer_ok
        assert (await front.ask(b'{"model": "asr"}', target="/v1/completions")).status == 200


@looped
async def test_the_deadline_of_these_routes_holds(tmp_path):
    async def think(connection: Connection) -> None:
        await connection.head()
        await connection.wait_gone()

    async with Front(tmp_path, {"asr": {"request_timeout": 0.1}}, behaviour=think) as front:
        answer = await front.ask(b'{"model": "asr"}', target="/v1/completions")
        assert (answer.status, answer.error["code"]) == (504, "timeout")
        await front.wait_free()
        assert front.outcomes() == {"timeout": 1}


@looped
async def test_the_only_model_is_the_default(tmp_path):
    async with Front(tmp_path, default_model="asr") as front:
        assert (await front.ask(json.dumps({"messages": []}).encode(), target="/v1/chat/completions")).status == 200


@looped
async def test_a_body_is_not_looked_at_where_there_are_no_upstreams(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("slimproc.http.openai.upstreams.decode", fail)
    async with Front(tmp_path, {"echo": {"backend": "fake"}}) as front:
        answer = await front.ask(b'{"model": "nope"}', target="/v1/completions")
        assert answer.status == 400, "it has no prompt, which is seen first"
