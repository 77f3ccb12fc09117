"""``POST /infer``: what reaches the upstream, what comes back, and what is refused, byte by byte."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import time

import pytest

from slimproc import errors
from slimproc.errors import InvalidRequest, ModelFailed
from slimproc.http.infer import split_query
from slimproc.replicas.states import ReplicaState
from tests.fakes import eventually, looped
from tests.http.relays import OK, Connection, Front, answer_ok, flat_error

# --- the query --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "name", "rest"),
    [
        ("/infer?model=a", "a", ""),
        ("/infer?x=1&model=a&y=2", "a", "?x=1&y=2"),
        ("/infer?model=org%2Fm%3AQ4_K_M", "org/m:Q4_K_M", ""),
        ("/infer?model=a+b&c=d+e%20f%2f", "a b", "?c=d+e%20f%2f"),
        ("/infer?%6Dodel=a&models=b&Model=c", "a", "?models=b&Model=c"),
        ("/infer?model=a&&x&=y&z=", "a", "?&x&=y&z="),
        ("/infer?model=%C3%BC", "ü", ""),
        ("/infer?model=a=b", "a=b", ""),
        ("/infer?model=a&q=1?2#part", "a", "?q=1?2"),
        ("http://host/infer?model=a&b=%zz", "a", "?b=%zz"),
        ("/infer?model=a&b=ü", "a", "?b=%C3%BC"),
        ("/infer?b=%26model%3Dx&model=a", "a", "?b=%26model%3Dx"),
    ],
)
def test_the_model_is_taken_off_the_query_and_nothing_else_changes(target, name, rest):
    assert split_query(target) == (name, rest)


@pytest.mark.parametrize(
    "target", ["/infer", "/infer?", "/infer?model", "/infer?model=", "/infer?x=1", "/infer#model=a"]
)
def test_without_a_model_the_query_is_refused(target):
    with pytest.raises(InvalidRequest, match="must name one"):
        split_query(target)


@pytest.mark.parametrize("target", ["/infer?model=a&model=a", "/infer?model=a&%6dodel=b", "/infer?model=&model=a"])
def test_a_model_that_is_named_twice_is_refused(target):
    """A proxy in front may have looked at the one, and we would act on the other."""
    with pytest.raises(InvalidRequest, match="more than once"):
        split_query(target)


# --- what goes and what comes back ------------------------------------------------------------------------------------


@looped
async def test_the_body_goes_unchanged_to_the_models_path_with_its_headers(tmp_path):
    body = b'--B\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + os.urandom(3000) + b"\r\n--B--\r\n"
    headers = (
        "Content-Type: multipart/form-data; boundary=B\r\nContent-Encoding: identity\r\nAuthorization: Bearer k\r\n"
        f"Content-Length: {len(body)}\r\nX-Request-Id: mine\r\nX-Custom: a, b\r\nCookie: c=1\r\n"
        "Connection: keep-alive, X-Hop\r\nX-Hop: no\r\nKeep-Alive: 5\r\nTE: trailers\r\nUpgrade: h2c\r\nProxy-Authorization: no\r\n"
    )
    seen = []

    async def take(connection: Connection) -> None:
        await connection.head()
        seen.append(await connection.body())
        connection.send(OK)

    async with Front(tmp_path, {"asr": {"aliases": ("whisper",)}}, behaviour=take) as front:
        answer = await front.ask(body, headers=headers, target="/infer?lang=d%65&model=whisper&n=1")
        connection = front.upstream.connections[0]
        assert (answer.status, answer.body) == (200, b"ok")
        assert seen == [body]
        assert connection.line == b"POST /v1/audio/transcriptions?lang=d%65&n=1 HTTP/1.1"
        sent = connection.headers
        assert sent.pop("host") == front.upstream.base_url.removeprefix("http://")
        sent.pop("connection", None)
        assert sent == {
            "content-type": "multipart/form-data; boundary=B",
            "content-encoding": "identity",
            "authorization": "Bearer k",
            "content-length": str(len(body)),
            "x-request-id": "mine",
            "x-custom": "a, b",
            "cookie": "c=1",
        }
        assert answer.headers["x-request-id"] == "mine"
        await front.wait_free()
        assert front.outcomes() == {"ok": 1}
        assert front.replicas[0].well_served == 1


@pytest.mark.parametrize("body", [b"", b"x"])
@looped
async def test_a_chunked_body_arrives_as_it_is(tmp_path, body):
    chunks = (b"1\r\nx\r\n" if body else b"") + b"0\r\n\r\n"
    seen = []

    async def take(connection: Connection) -> None:
        await connection.head()
        seen.append(await connection.body())
        connection.send(OK)

    async with Front(tmp_path, behaviour=take) as front:
        assert (await front.ask(chunks, headers="Transfer-Encoding: chunked\r\n")).status == 200
        assert seen == [body]


@looped
async def test_a_request_without_a_body_has_none_there_either(tmp_path):
    async with Front(tmp_path) as front:
        assert (await front.ask(b"")).status == 200
        assert front.upstream.connections[0].headers["content-length"] == "0"


@pytest.mark.parametrize("status", [200, 201, 400, 404, 418, 429, 500, 503])
@looped
async def test_the_answer_comes_back_as_it_is_whatever_its_status(tmp_path, status):
    body = b'{"error": {"code": "THEIRS"}}'

    async def refuse(connection: Connection) -> None:
        await connection.head()
        await connection.body()
        connection.send(
            b"HTTP/1.1 %d Their Words\r\nContent-Type: application/x-own\r\nX-Own: 1\r\nSet-Cookie: a=1\r\nServer: theirs\r\n"
            b"Date: Thu, 01 Oct 2026 00:00:00 GMT\r\nKeep-Alive: 5\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n"
            b"Connection: close, X-Hop\r\nX-Hop: 1\r\n\r\n" % (status, len(body)) + body
        )

    async with Front(tmp_path, behaviour=refuse) as front:
        client = await front.begin()
        head = (await client.reader.readuntil(b"\r\n\r\n")).decode()
        assert head.startswith(f"HTTP/1.1 {status} Their Words\r\n")
        assert await client.reader.readexactly(len(body)) == body
        lines = {line.partition(": ")[0].lower(): line.partition(": ")[2] for line in head.splitlines()[1:-1]}
        assert lines.pop("x-request-id")
        assert lines == {
            "content-type": "application/x-own",
            "x-own": "1",
            "set-cookie": "a=1",
            "server": "theirs",
            "date": "Thu, 01 Oct 2026 00:00:00 GMT",
            "content-encoding": "gzip",
            "content-length": str(len(body)),
        }
        await front.wait_free()
        assert front.outcomes() == {"ok" if status < 500 else "engine_error": 1}


@looped
async def test_a_streamed_answer_passes_through_as_it_comes(tmp_path):
    told = asyncio.Event()

    async def stream(connection: Connection) -> None:
        await connection.head()
        await connection.body()
        connection.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        await told.wait()
        connection.send(b"3\r\ntwo\r\n0\r\n\r\n")

    async with Front(tmp_path, behaviour=stream) as front:
        client = await front.begin()
        assert await client.reader.readuntil(b"one\r\n")
        told.set()
        assert await client.reader.readuntil(b"0\r\n\r\n") == b"3\r\ntwo\r\n0\r\n\r\n"


@looped
async def test_an_answer_that_comes_before_the_upload_has_ended_is_passed_on(tmp_path):
    async def refuse(connection: Connection) -> None:
        await connection.head()
        connection.send(b"HTTP/1.1 413 No\r\nContent-Length: 3\r\n\r\nbig")
        await connection.wait_gone()

    async with Front(tmp_path, behaviour=refuse) as front:
        answer = await front.ask(b"some of it", headers="Content-Length: 100000\r\n")
        assert (answer.status, answer.body, answer.headers["connection"]) == (413, b"big", "close")
        await eventually(lambda: front.upstream.connections[0].gone, "the half-used connection is closed")
        await front.wait_free()
        assert front.outcomes() == {"ok": 1}


@looped
async def test_the_same_connection_serves_several_requests_one_after_the_other(tmp_path):
    async with Front(tmp_path) as front:
        client = await front.connect()
        for _ in range(3):
            assert (await client.post(b"hello", path="/infer?model=asr")).status == 200
        assert front.outcomes() == {"ok": 3}


@pytest.mark.parametrize(
    "value",
    ["caf\xe9".encode("latin-1"), "ü".encode(), b"\xff\xfe", b'a"b', b"x" * 4000],
    ids=lambda value: repr(value[:9]),
)
@looped
async def test_odd_header_values_break_nothing(tmp_path, value):
    async with Front(tmp_path) as front:
        client = await front.connect()
        client.send(b"POST /infer?model=asr HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nX-Odd: " + value + b"\r\n\r\n")
        assert (await client.answer()).status == 200


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("/infer", (400, "BAD_REQUEST")),
        ("/infer?model=", (400, "BAD_REQUEST")),
        ("/infer?model=asr&model=asr", (400, "BAD_REQUEST")),
        ("/infer?model=nope", (404, "NOT_FOUND")),
        ("/infer?model=ASR", (404, "NOT_FOUND")),
        ("/infer?model=%FF%FE", (404, "NOT_FOUND")),
        ("/infer?model=asr%00", (404, "NOT_FOUND")),
        ("/infer?model=" + "x" * 5000, (404, "NOT_FOUND")),
    ],
)
@looped
async def test_a_model_that_is_not_there_is_refused_in_infers_shape(tmp_path, target, told):
    async with Front(tmp_path) as front:
        answer = await front.ask(target=target)
        assert flat_error(answer) == told
        assert len(answer.body) < 1200
        assert not front.upstream.connections


@looped
async def test_a_star_takes_any_name(tmp_path):
    async with Front(tmp_path, {"asr": {"aliases": ("*",)}}) as front:
        assert (await front.ask(target="/infer?model=anything")).status == 200


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
@looped
async def test_other_methods_are_405_in_infers_shape(tmp_path, method):
    async with Front(tmp_path) as front:
        answer = await front.ask(method=method)
        assert flat_error(answer) == (405, "METHOD_NOT_ALLOWED")
        assert answer.headers["allow"] == "POST"


@looped
async def test_a_wrong_deadline_is_refused(tmp_path):
    async with Front(tmp_path) as front:
        assert flat_error(await front.ask(headers="X-Request-Timeout: soon\r\n")) == (400, "BAD_REQUEST")
        assert front.outcomes() == {"invalid": 1}


@looped
async def test_an_expectation_that_cannot_be_met_is_417(tmp_path):
    async with Front(tmp_path) as front:
        assert flat_error(await front.ask(headers="Expect: 200-ok\r\n")) == (417, "BAD_REQUEST")


@looped
async def test_a_body_that_is_too_large_by_its_length_is_413_at_once_even_while_the_model_is_away(tmp_path):
    async with Front(tmp_path, {"asr": {"max_body": 100}}, ready=False) as front:
        answer = await front.ask(b"", headers="Content-Length: 101\r\n")
        assert flat_error(answer) == (413, "BODY_TOO_LARGE")
        assert answer.headers["connection"] == "close"
        assert front.outcomes() == {"body": 1}


@looped
async def test_a_body_that_turns_out_too_large_is_413_and_its_forwarding_broken_off(tmp_path):
    async def take(connection: Connection) -> None:
        await connection.head()
        await connection.wait_gone()

    async with Front(tmp_path, {"asr": {"max_body": 100}}, behaviour=take) as front:
        client = await front.begin(b"64\r\n" + b"x" * 100 + b"\r\n", headers="Transfer-Encoding: chunked\r\n")
        await front.wait_forwarded()
        client.send(b"1\r\ny\r\n")
        assert flat_error(await client.answer()) == (413, "BODY_TOO_LARGE")
        await eventually(lambda: front.upstream.connections[0].gone, "the upstream's connection is closed")
        await front.wait_free()
        assert front.outcomes() == {"body": 1}


@looped
async def test_a_body_of_exactly_the_limit_passes(tmp_path):
    async with Front(tmp_path, {"asr": {"max_body": 100}}) as front:
        assert (await front.ask(b"x" * 100)).status == 200


@looped
async def test_a_body_that_does_not_come_is_408(tmp_path):
    async def take(connection: Connection) -> None:
        await connection.head()
        await connection.wait_gone()

    async with Front(tmp_path, behaviour=take, body_timeout=0.1) as front:
        answer = await front.ask(b"x", headers="Content-Length: 100\r\n")
        assert flat_error(answer) == (408, "BODY_TIMEOUT")
        assert answer.headers["connection"] == "close"
        await front.wait_free()
        assert front.outcomes() == {"body": 1}


@looped
async def test_an_upstream_that_reads_slowly_is_not_the_clients_fault(tmp_path):
    """The client has sent everything; only the upstream takes its time, longer than a client would have."""
    body = b"x" * (8 << 20)

    async def take(connection: Connection) -> None:
        await connection.head()
        await asyncio.sleep(0.5)
        await connection.body()
        connection.send(OK)

    async with Front(tmp_path, {"asr": {"max_body": 1 << 30}}, behaviour=take, body_timeout=0.2) as front:
        assert (await front.ask(body)).status == 200


@pytest.mark.parametrize("chunks", [b"zz\r\n", b"5\r\nabc"])
@looped
async def test_broken_framing_ends_the_forwarding(tmp_path, chunks):
    async def take(connection: Connection) -> None:
        await connection.head()
        await connection.wait_gone()

    async with Front(tmp_path, behaviour=take, body_timeout=0.2) as front:
        answer = await front.ask(chunks, headers="Transfer-Encoding: chunked\r\n")
        assert answer.status in {400, 408}
        await front.wait_free()


# --- waiting ----------------------------------------------------------------------------------------------------------


@looped
async def test_the_body_is_asked_for_only_when_the_model_can_take_it(tmp_path):
    async with Front(tmp_path, ready=False) as front:
        client = await front.begin(b"", headers="Expect: 100-continue\r\nContent-Length: 5\r\n")
        await eventually(lambda: front.admission.queue_depths()["asr"], "it waits")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.reader.read(1)
        front.become_ready(front.upstream)
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"hello")
        assert (await client.answer()).status == 200
        assert "expect" not in front.upstream.connections[0].headers


@looped
async def test_a_refused_request_is_not_asked_for_its_body(tmp_path):
    async with Front(tmp_path, ready=False, max_queue_total=0) as front:
        answer = await front.ask(b"", headers="Expect: 100-continue\r\nContent-Length: 5\r\n")
        assert flat_error(answer) == (429, "QUEUE_FULL")
        assert int(answer.headers["retry-after"]) >= 1


@looped
async def test_who_waits_longer_than_the_queue_allows_gets_504(tmp_path):
    async with Front(tmp_path, ready=False, queue_timeout=0.05) as front:
        assert flat_error(await front.ask()) == (504, "QUEUE_TIMEOUT")
        assert front.outcomes() == {"timeout": 1}
        assert not front.admission.queue_depths()["asr"]


@looped
async def test_the_queues_limit_ends_with_the_wait_and_the_inference_has_none(tmp_path):
    async def think(connection: Connection) -> None:
        await connection.head()
        await connection.body()
        await asyncio.sleep(0.3)
        connection.send(OK)

    async with Front(tmp_path, behaviour=think, queue_timeout=0.1) as front:
        assert (await front.ask()).status == 200


@pytest.mark.parametrize("how", ["caller", "model"])
@looped
async def test_a_deadline_of_the_callers_or_the_models_own_cuts_off_the_inference(tmp_path, how):
    async def think(connection: Connection) -> None:
        await connection.head()
        await connection.body()
        await connection.wait_gone()

    own = {"request_timeout": 0.1, "origins": {"request_timeout": "file"}} if how == "model" else {}
    async with Front(tmp_path, {"asr": own}, behaviour=think) as front:
        answer = await front.ask(headers="" if how == "model" else "X-Request-Timeout: 0.1\r\n")
        assert flat_error(answer) == (504, "BACKEND")
        assert answer.headers["x-should-retry"] == "false"
        await eventually(lambda: front.upstream.connections[0].gone, "the upstream's connection is closed")
        await front.wait_free()
        assert front.outcomes() == {"timeout": 1}


@looped
async def test_requests_go_one_after_the_other_in_their_order(tmp_path):
    order: list[bytes] = []

    async def take(connection: Connection) -> None:
        await connection.head()
        order.append(await connection.body())
        connection.send(OK)

    async with Front(tmp_path, behaviour=take, ready=False) as front:
        clients = []
        for place in range(5):
            clients.append(await front.begin(b"%d" % place))
            await eventually(lambda: front.admission.queue_depths()["asr"] == len(clients), "it waits")
        front.become_ready(front.upstream)
        for client in clients:
            assert (await client.answer()).status == 200
        assert order == [b"0", b"1", b"2", b"3", b"4"]


@looped
async def test_a_load_that_failed_is_told_as_such(tmp_path):
    async with Front(tmp_path, ready=False) as front:
        client = await front.begin()
        await eventually(lambda: front.admission.queue_depths()["asr"], "it waits")
        front.replicas[0].become(ReplicaState.BACKOFF, "no such container", load_failed=True)
        answer = await client.answer()
        assert flat_error(answer) == (502, "LOAD_FAILED")
        assert b"no such container" in answer.body


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (errors.InsufficientMemory("too big", plan={"needed": 5}), (503, "RESOURCES")),
        (errors.UnloadFailed("it would not go"), (502, "UNLOAD_FAILED")),
        (errors.LifecyclePending("wait"), (503, "LIFECYCLE_PENDING")),
        (errors.NotReady("no sample"), (503, "NOT_READY")),
        (errors.DrainTimeout("busy"), (504, "DRAIN_TIMEOUT")),
        (ModelFailed("no"), (502, "LOAD_FAILED")),
    ],
)
@looped
async def test_what_residency_says_to_who_waits_has_its_code(tmp_path, error, told):
    async with Front(tmp_path, ready=False) as front:
        client = await front.begin()
        await eventually(lambda: front.admission.queue_depths()["asr"], "it waits")
        front.admission.fail_waiting("asr", error)
        answer = await client.answer()
        assert flat_error(answer) == told
        assert json.loads(answer.body).get("plan") == getattr(error, "plan", None)


@looped
async def test_in_a_shutdown_who_waits_is_told_and_what_runs_is_cut_after_its_time(tmp_path):
    async def think(connection: Connection) -> None:
        await connection.head()
        await connection.wait_gone()

    async with Front(tmp_path, behaviour=think) as front:
        running = await front.begin()
        await front.wait_forwarded()
        waiting = await front.begin()
        await eventually(lambda: front.admission.queue_depths()["asr"], "it waits")
        front.admission.close()
        assert flat_error(await waiting.answer()) == (503, "SHUTDOWN")
        assert flat_error(await front.ask()) == (503, "SHUTDOWN")
        front.admission.abort()
        assert flat_error(await running.answer()) == (503, "SHUTDOWN")
        await front.wait_free()


# --- clients that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["queued", "uploading", "waiting", "streaming"])
@pytest.mark.parametrize("how", ["closed", "reset"])
@looped
async def test_a_client_that_leaves_frees_everything_at_once(tmp_path, where, how):
    async def slow(connection: Connection) -> None:
        await connection.head()
        if where == "streaming":
            await connection.body()
            connection.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        await connection.wait_gone()

    async with Front(tmp_path, behaviour=slow, ready=where != "queued") as front:
        client = await front.begin(b"hello", headers="Content-Length: 50\r\n" if where == "uploading" else "")
        if where == "queued":
            await eventually(lambda: front.admission.queue_depths()["asr"], "it waits")
        else:
            await front.wait_forwarded()
        if where == "streaming":
            await client.reader.readuntil(b"one\r\n")
        if how == "reset":
            client.writer.transport.abort()
        else:
            client.writer.close()
        await eventually(lambda: front.outcomes() == {"cancelled": 1}, "it is cancelled")
        await front.wait_free()
        if where != "queued":
            await eventually(lambda: front.upstream.connections[0].gone, "the upstream's connection is closed")


@looped
async def test_a_client_that_leaves_in_an_upload_that_nobody_takes_is_noticed(tmp_path):
    """Its bytes fill every buffer and aiohttp has paused reading: no end of file can be seen, but the kernel knows."""

    released = asyncio.Event()

    async def stuck(connection: Connection) -> None:
        connection.writer.transport.pause_reading()
        await released.wait()

    async with Front(tmp_path, {"asr": {"max_body": 1 << 40}}, behaviour=stuck) as front:
        client = await front.begin(b"", headers=f"Content-Length: {1 << 30}\r\n")
        client.writer.transport.set_write_buffer_limits(1 << 16)

        async def upload() -> None:
            while True:
                client.send(bytes(1 << 16))
                await client.writer.drain()

        uploading = asyncio.ensure_future(upload())
        await asyncio.wait({uploading}, timeout=0.3)
        assert not uploading.done(), "nobody takes it"
        uploading.cancel()
        sock = client.writer.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # else not even the kernel knows
        client.writer.transport.abort()
        await eventually(lambda: front.outcomes() == {"cancelled": 1}, "it is cancelled")
        await front.wait_free()
        released.set()


# --- upstreams that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"NONSENSE\r\n\r\n",
        b"HTTP/1.1 99 Low\r\n\r\n",
        b"HTTP/1.1 999 High\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=lambda said: repr(said[:24]),
)
@looped
async def test_an_upstream_that_gives_no_whole_head_is_502(tmp_path, said):
    async def fail(connection: Connection) -> None:
        await connection.head()
        await connection.body()
        connection.send(said)

    async with Front(tmp_path, behaviour=fail) as front:
        answer = await front.ask()
        assert flat_error(answer) == (502, "BACKEND")
        assert front.upstream.base_url.encode() not in answer.body
        await front.wait_free()
        assert front.outcomes() == {"engine_error": 1}
        front.upstream.behaviour = answer_ok
        assert (await front.ask()).status == 200


@pytest.mark.parametrize(
    ("head", "rest"),
    [
        (b"Content-Length: 100\r\n\r\nshort", b""),
        (b"Transfer-Encoding: chunked\r\n\r\n5\r\nshort\r\n", b""),
        (b"Transfer-Encoding: chunked\r\n\r\n5\r\nshort\r\n", b"zz\r\n"),
    ],
    ids=["length", "chunked", "bad chunk"],
)
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@looped
async def test_an_answer_that_breaks_off_has_no_false_end(tmp_path, head, rest, version):
    seen = asyncio.Event()

    async def fail(connection: Connection) -> None:
        await connection.head()
        await connection.body()
        connection.send(b"HTTP/1.1 200 OK\r\n" + head)
        await seen.wait()
        connection.send(rest)

    async with Front(tmp_path, behaviour=fail) as front:
        client = await front.connect()
        client.send(b"POST /infer?model=asr HTTP/%s\r\nHost: x\r\nContent-Length: 1\r\n\r\nx" % version)
        raw, reset = await client.reader.readuntil(b"short"), False
        seen.set()
        try:
            raw += await client.reader.read()
        except ConnectionError:
            reset = True
        assert raw.startswith(b"HTTP/%s 200 OK\r\n" % version)
        assert b"0\r\n\r\n" not in raw.partition(b"\r\n\r\n")[2], "the request id may end in 0 as well"
        assert b"error" not in raw
        if b"ontent-Length" not in raw and version == b"1.0":
            assert reset, "a mere end of the connection would look like the end of the answer"
        await front.wait_free()
        assert front.outcomes() == {"engine_error": 1}


@looped
async def test_an_upstream_that_nobody_listens_at_is_502(tmp_path):
    async with Front(tmp_path) as front:
        await front.upstream.close()
        assert flat_error(await front.ask()) == (502, "BACKEND")
        assert len(front.upstream.unreachable) == 1
        await front.wait_free()
        assert front.outcomes() == {"engine_error": 1}


@looped
async def test_where_there_are_several_another_server_takes_what_one_could_not_be_reached_for(tmp_path):
    async with Front(tmp_path, servers=2) as front:
        gone, there = front.upstreams
        await gone.close()
        client = await front.begin(b"", headers="Expect: 100-continue\r\nContent-Length: 5\r\n")
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"hello")
        assert (await client.answer()).status == 200
        assert len(gone.unreachable) == 1
        assert len(there.connections) == 1
        await front.wait_free()
        assert front.outcomes() == {"ok": 1}
        assert [replica.well_served for replica in front.replicas] == [0, 1]


@looped
async def test_a_second_server_that_cannot_be_reached_either_is_the_end(tmp_path):
    async with Front(tmp_path, servers=3) as front:
        for upstream in front.upstreams[:2]:
            await upstream.close()
        assert flat_error(await front.ask()) == (502, "BACKEND")
        assert not front.upstreams[2].connections
        await front.wait_free()


@looped
async def test_a_body_that_was_sent_once_is_not_sent_again(tmp_path):
    async def die(connection: Connection) -> None:
        await connection.head()
        await connection.body()
        connection.reset()

    async with Front(tmp_path, servers=2, behaviour=die) as front:
        assert flat_error(await front.ask()) == (502, "BACKEND")
        assert [len(upstream.connections) for upstream in front.upstreams] == [1, 0]
        await front.wait_free()


@looped
async def test_a_server_that_is_ended_breaks_off_what_it_was_asked(tmp_path):
    async def think(connection: Connection) -> None:
        await connection.head()
        await connection.wait_gone()

    async with Front(tmp_path, behaviour=think) as front:
        client = await front.begin()
        await front.wait_forwarded()
        for slot in list(front.upstream.taken):
            slot.lose("it was killed")
        answer = await client.answer()
        assert flat_error(answer) == (502, "BACKEND")
        assert b"it was killed" in answer.body
        await eventually(lambda: front.upstream.connections[0].gone, "the connection is closed")
        await front.wait_free()


@looped
async def test_a_large_upload_and_a_large_answer_pass_in_bounded_memory(tmp_path):
    """What one side does not take, the other is not asked for: 64 MiB each way, with buffers of a few."""
    size = 64 << 20
    held: list[int] = []

    async def echo(connection: Connection) -> None:
        await connection.head()
        connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        left = size
        while left:
            piece = await connection.reader.read(1 << 20)
            left -= len(piece)
            connection.send(piece)
            await connection.writer.drain()

    async with Front(tmp_path, {"asr": {"max_body": size}}, behaviour=echo) as front:
        client = await front.begin(b"", headers=f"Content-Length: {size}\r\n")

        async def upload() -> None:
            for _ in range(size >> 20):
                client.send(bytes(1 << 20))
                await client.writer.drain()
                held.append(front.admission.in_flight()["asr"])

        uploading = asyncio.ensure_future(upload())
        await client.reader.readuntil(b"\r\n\r\n")
        # While nobody reads the answer, the upload has to come to a stand.
        before = -1
        while len(held) != before:
            before = len(held)
            await asyncio.sleep(0.1)
        assert len(held) < 40
        assert len(await client.reader.readexactly(size)) == size
        await uploading
        await front.wait_free()
        assert front.outcomes() == {"ok": 1}


# --- local models -----------------------------------------------------------------------------------------------------

CHAT = json.dumps({"model": "nope", "prompt": "hi", "max_tokens": 1}).encode()


def local(path: str = "/v1/completions", **fields) -> dict[str, dict]:
    return {"asr": {}, "echo": {"backend": "fake", "inference_path": path, **fields}}


@looped
async def test_a_local_model_answers_its_endpoint_whatever_model_the_body_names(tmp_path):
    async with Front(tmp_path, local()) as front:
        client = await front.begin(CHAT, target="/infer?model=echo")
        engine = front.replicas[-1].engine
        await eventually(lambda: engine.submits, "it has started")
        engine.finish(1)
        answer = await client.answer()
        assert (answer.status, json.loads(answer.body)["model"]) == (200, "echo")
        assert front.outcomes("echo") == {"ok": 1}


@looped
async def test_errors_of_a_local_model_have_infers_shape(tmp_path):
    async with Front(tmp_path, local()) as front:
        engine = front.replicas[-1].engine
        assert flat_error(await front.ask(b"{", target="/infer?model=echo")) == (400, "BAD_REQUEST")
        for error, told in (
            (errors.EngineError("no"), (502, "BACKEND")),
            (errors.InvalidRequest("no"), (400, "BAD_REQUEST")),
        ):
            client = await front.begin(CHAT, target="/infer?model=echo")
            await eventually(lambda: engine.streams, "it has started")
            engine.fail(max(engine.streams), error)
            assert flat_error(await client.answer()) == told


@looped
async def test_an_error_in_a_local_models_stream_has_infers_shape_too(tmp_path):
    async with Front(tmp_path, local()) as front:
        engine = front.replicas[-1].engine
        client = await front.begin(json.dumps({"prompt": "hi", "stream": True}).encode(), target="/infer?model=echo")
        await eventually(lambda: engine.streams, "it has started")
        engine.say(1, "x")
        await client.reader.readuntil(b'"text":"x"')
        engine.fail(1, errors.EngineError("hiccup"))
        assert b'data: {"error":"hiccup","src":"slimproc","code":"BACKEND"}' in await client.reader.readuntil(b"[DONE]")


@looped
async def test_a_local_model_is_waited_for_as_long_as_the_queue_allows_and_then_has_no_limit(tmp_path):
    async with Front(tmp_path, local(request_timeout=0.01), queue_timeout=0.15) as front:
        engine = front.replicas[-1].engine
        running = [await front.begin(CHAT, target="/infer?model=echo") for _ in range(4)]
        await eventually(lambda: len(engine.streams) == 4, "all slots are taken")
        assert flat_error(await front.ask(CHAT, target="/infer?model=echo")) == (504, "QUEUE_TIMEOUT")
        for rid in list(engine.streams):
            engine.finish(rid)
        for client in running:
            assert (await client.answer()).status == 200


@looped
async def test_a_local_models_client_is_told_to_go_on_too(tmp_path):
    async with Front(tmp_path, local()) as front:
        headers = f"Expect: 100-continue\r\nContent-Length: {len(CHAT)}\r\n"
        client = await front.begin(b"", target="/infer?model=echo", headers=headers)
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(CHAT)
        engine = front.replicas[-1].engine
        await eventually(lambda: engine.submits, "it has started")
        engine.finish(1)
        assert (await client.answer()).status == 200


@looped
async def test_the_wall_clock_has_no_say(tmp_path, monkeypatch):
    real = time.time
    async with Front(tmp_path, ready=False, queue_timeout=60.0) as front:
        client = await front.begin()
        await eventually(lambda: front.admission.queue_depths()["asr"], "it waits")
        monkeypatch.setattr(time, "time", lambda: real() + 86400)
        front.become_ready(front.upstream)
        assert (await client.answer()).status == 200
