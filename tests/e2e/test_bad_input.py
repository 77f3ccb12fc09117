"""Hostile and broken requests: a clear JSON error each, the connection in step, and the next request served."""

from __future__ import annotations

import gzip
import json

import pytest

from tests.serving import CHAT, COMPLETIONS, ServerProcess, fake, script, wait_until

GOOD = b'{"prompt":"hi","max_tokens":1}'


def exchange(server, data: bytes) -> bytes:
    """All that comes back until the server closes."""
    with server.raw(data) as sock:
        received = b""
        while piece := sock.recv(65536):
            received += piece
    return received


def head_of(path=COMPLETIONS, method="POST", **headers) -> bytes:
    lines = "".join(f"{key.replace('_', '-')}: {value}\r\n" for key, value in headers.items())
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode()


def assert_serves(server):
    assert server.post(COMPLETIONS, GOOD).text == " tok0"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"5",
        b"{",
        b"{:",
        b'{"prompt":"x",}',
        b'{"prompt":"x"} trailing',
        b"\xff\xfe",
        b'{"prompt":"\xc4\xe3\xba\xc3"}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"a\\u0000b"}',
        b'{"prompt":"x","prompt":"y"}',
        b'{"prompt":"x","temperature":NaN}',
        b'{"prompt":"x","temperature":Infinity}',
        b'{"prompt":"x","max_tokens":' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt":"x","metadata":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"messages":[{"role":"user","content":"x"}],"tools":[{"parameters":'
        + b'{"a":' * 1000
        + b"1"
        + b"}" * 1002
        + b"}",
    ],
)
def test_a_body_that_is_no_good_json_is_400_and_the_next_request_is_served(server, body):
    for path in (COMPLETIONS, CHAT):
        answer = server.post(path, body)
        assert answer.status == 400, answer.body
        assert answer.headers["Content-Type"].startswith("application/json")
        assert answer.error["type"] == "invalid_request_error"
        assert len(answer.error["message"]) < 1100
    assert_serves(server)


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/json; charset=UTF-8"]
)
def test_json_is_json_whatever_its_content_type(server, kind):
    head = {"Content_Length": len(GOOD), "Connection": "close"} | ({"Content_Type": kind} if kind else {})
    received = exchange(server, head_of(**head) + GOOD)
    assert received.startswith(b"HTTP/1.1 200")


def test_a_byte_order_mark_in_front_is_no_part_of_the_body(server):
    assert server.post(COMPLETIONS, b"\xef\xbb\xbf" + GOOD).status == 200


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"Content_Type": "application/json; charset=utf-16"}, GOOD.decode().encode("utf-16")),
        ({"Content_Type": "multipart/form-data; boundary=x"}, b"--x--"),
        ({"Content_Encoding": "gzip"}, gzip.compress(GOOD, mtime=0)),
    ],
)
def test_what_is_not_plain_utf8_is_415(server, headers, body):
    answer = server.post(COMPLETIONS, body, **headers)
    assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")
    assert_serves(server)


def test_a_body_of_megabytes_is_served_where_it_fits_the_context(serve):
    server = serve(fake(context=1_040_000))
    answer = server.chat("x" * 2_000_000, max_tokens=1)
    assert answer.status == 200
    assert answer.json["usage"]["prompt_tokens"] > 1_000_000
    answer = server.chat("x" * 3_000_000, max_tokens=1)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A server that takes bodies of 2,000 bytes, within half a second."""
    with ServerProcess(
        tmp_path_factory.mktemp("small"), fake() | {"max_json_body": 2000, "body_timeout": 0.5}
    ) as process:
        yield process.wait_ready()


def padded(length: int) -> bytes:
    return GOOD[:-1] + b" " * (length - len(GOOD)) + b"}"


def test_the_body_limit_is_exact_and_its_refusal_is_json(small):
    assert small.post(COMPLETIONS, padded(2000)).status == 200
    answer = small.post(COMPLETIONS, padded(2001))
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")
    assert "2000" in answer.error["message"]


def test_a_chunked_body_past_the_limit_is_refused_and_the_connection_closed(small):
    body = padded(5000)
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:1500], body[1500:])) + b"0\r\n\r\n"
    after = head_of(Content_Length=len(GOOD)) + GOOD
    received = exchange(small, head_of(Transfer_Encoding="chunked") + chunks + after)
    assert received.startswith(b"HTTP/1.1 413")
    assert received.count(b"HTTP/1.1 ") == 1, "what followed must not be taken for a request"


def test_what_follows_a_body_that_was_too_large_is_never_taken_for_a_request(small):
    smuggled = head_of("/metrics", "GET")
    received = exchange(small, head_of(Content_Length=3000) + smuggled + b" " * (3000 - len(smuggled)) + smuggled)
    assert received.startswith(b"HTTP/1.1 413")
    assert received.count(b"HTTP/1.1 ") == 1
    assert b"slimproc_" not in received


def test_a_body_that_does_not_come_is_408(small):
    received = exchange(small, head_of(Content_Length=100) + b'{"prompt":')
    assert received.startswith(b"HTTP/1.1 408")
    assert b'"request_timeout"' in received


def test_a_client_that_leaves_in_its_own_body_is_no_error(small):
    small.raw(head_of(Content_Length=100) + b'{"prompt":').close()
    assert_serves(small)
    assert "Traceback" not in small.log


def test_expect_100_continue_is_answered_before_the_body_is_sent(server):
    with server.raw(head_of(Content_Length=len(GOOD), Expect="100-continue", Connection="close")) as sock:
        received = b""
        while b"\r\n\r\n" not in received:
            received += sock.recv(1000)
        assert received.startswith(b"HTTP/1.1 100 ")
        sock.sendall(GOOD)
        while piece := sock.recv(65536):
            received += piece
    assert b"HTTP/1.1 200 OK" in received


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"Content_Length": 5000, "Expect": "100-continue"}, 413), ({"Content_Length": 30, "Expect": "x"}, 417)],
)
def test_an_expectation_that_cannot_be_met_is_refused_without_the_body(small, headers, status):
    received = exchange(small, head_of(**headers))
    assert received.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"100 Continue" not in received
    assert b'{"error":' in received


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a TLS client\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n", 400),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 20_000 + b"\r\n\r\n", 431),
    ],
)
def test_what_is_no_http_is_refused_in_json(server, data, status):
    received = exchange(server, data)
    assert received.startswith((f"HTTP/1.1 {status} ".encode(), f"HTTP/1.0 {status} ".encode()))
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"application/json" in head
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert_serves(server)


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/", "/v1/completions/", "/admin/replicas", "/v1/embeddingsx", "//v1/models", "/%00"]
)
def test_an_unknown_path_is_404_in_json(server, path):
    for method in ("GET", "POST"):
        answer = server.request(method, path, b"{}" if method == "POST" else None)
        assert answer.status == 404
        assert answer.error["code"] in ("not_found", "model_not_found")


def test_no_error_tells_of_files_or_lines(server):
    bodies = [b"{", b"[" * 1000, b'{"prompt":5}', json.dumps({"prompt": script(error_at=1)}).encode()]
    for body in bodies:
        text = server.post(COMPLETIONS, body).body.decode()
        assert "Traceback" not in text
        assert ".py" not in text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1), ("temperature", 2.1), ("top_p", 0), ("top_p", 1.1), ("min_p", 2), ("presence_penalty", 3),
        ("frequency_penalty", -3), ("seed", 1.5), ("seed", 2**64), ("logit_bias", {"x": 1}), ("logit_bias", {"1": 101}),
        ("n", 0), ("n", 1000), ("top_k", -2), ("stream_options", 5), ("model", 5),
    ],
)  # fmt: skip
def test_numbers_out_of_range_are_refused_by_name(server, field, value):
    for answer in (server.complete("hi", **{field: value}), server.chat("hi", **{field: value})):
        assert answer.status == 400, answer.body
        assert answer.error["param"].startswith(field)


def test_a_bad_script_for_the_fake_is_the_callers_fault(server):
    answer = server.complete('!fake {"tokenz": []}')
    assert (answer.status, answer.error["param"]) == (400, "prompt")
    wait_until(lambda: not server.replica()["sequences"], "it holds no slot")
