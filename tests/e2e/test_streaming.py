"""Server-sent events on the wire: their shape, their headers, keep-alive comments, and the connection afterwards."""

from __future__ import annotations

import pytest

from tests.serving import CHAT, COMPLETIONS, ServerProcess, fake, script, wait_until

PATHS = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


def receive_all(sock) -> bytes:
    data = b""
    while piece := sock.recv(65536):
        data += piece
    return data


def post(body: bytes, *, path: str = COMPLETIONS, version: str = "1.1", more: str = "") -> bytes:
    return f"POST {path} HTTP/{version}\r\nHost: x\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


def test_a_completions_stream_is_one_event_a_token_then_the_reason_then_done(server):
    with server.stream("hi", max_tokens=3) as reader:
        *chunks, done = reader.events()
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert {chunk["model"] for chunk in chunks} == {"fake"}
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [" tok0", " tok1", " tok2", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "length"]


def test_a_chat_stream_begins_with_the_role_and_ends_with_an_empty_delta(server):
    with server.stream(script(tokens=["a", "b"]), path=CHAT) as reader:
        *chunks, done = reader.events()
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]


@PATHS
def test_the_headers_keep_proxies_from_holding_the_stream_back(server, path):
    with server.stream("hi", path=path, max_tokens=1) as reader:
        headers = reader.headers
        list(reader.events())
    assert headers["Content-Type"].split(";")[0] == "text/event-stream"
    assert headers["Cache-Control"] == "no-cache"
    assert headers["X-Accel-Buffering"] == "no"
    assert headers["Content-Encoding"] is None


def test_no_stream_is_compressed_even_when_asked(server):
    body = b'{"prompt":"hi","stream":true,"max_tokens":2}'
    sock = server.raw(post(body, more="Accept-Encoding: gzip, deflate, br\r\nConnection: close\r\n"))
    with sock:
        assert b" tok1" in receive_all(sock)


@PATHS
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_usage_is_not_sent_unasked(server, path, options):
    with server.stream("hi", path=path, max_tokens=2, stream_options=options) as reader:
        *chunks, _ = reader.events()
    assert all(chunk["choices"] for chunk in chunks)
    assert all("usage" not in chunk for chunk in chunks)


@PATHS
def test_usage_that_was_asked_for_comes_once_after_the_reason_with_the_joined_answers_numbers(server, path):
    with server.stream("hi", path=path, max_tokens=2, stream_options={"include_usage": True}) as reader:
        *chunks, usage, done = reader.events()
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    joined = server.begin("hi", path=path, max_tokens=2).answer().json
    assert usage["usage"] == joined["usage"]


@PATHS
def test_stream_options_without_a_stream_are_refused(server, path):
    answer = server.begin("hi", path=path, stream_options={"include_usage": True}).answer()
    assert (answer.status, answer.error["param"]) == (400, "stream_options")


@PATHS
def test_the_choices_of_n_share_a_stream_and_each_ends_once(server, path):
    with server.stream(script(tokens=["a", "b", "c"]), path=path, n=3) as reader:
        *chunks, done = reader.events()
    assert done == "[DONE]"
    texts, reasons = ["", "", ""], [[], [], []]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        reasons[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert texts == ["abc"] * 3
    assert reasons == [["stop"]] * 3


@pytest.fixture(scope="module")
def impatient(tmp_path_factory):
    """A server that keeps silent streams open with comments every 0.1 s."""
    with ServerProcess(tmp_path_factory.mktemp("impatient"), fake(slots=1) | {"keepalive_after": 0.1}) as process:
        yield process.wait_ready()


@PATHS
def test_a_silent_stream_gets_comments_between_its_events_and_none_after_done(impatient, path):
    prompt = script(tokens=["a", "b"], prefill_steps=3, prefill_latency=0.2, token_latency=0.5)
    with impatient.stream(prompt, path=path) as reader:
        assert reader.status == 200
        lines = list(reader.lines())
    comments = [place for place, line in enumerate(lines) if line.startswith(b":")]
    data = [place for place, line in enumerate(lines) if line.startswith(b"data: ")]
    assert lines[data[-1]] == b"data: [DONE]"
    assert min(comments) < min(data) or path == CHAT, "while it is in prefill"
    assert any(data[0] < place < data[-1] for place in comments), "between two tokens"
    assert max(comments) < data[-1]
    assert all(lines[place + 1] == b"" for place in comments + data)
    text = b"".join(lines)
    assert text.index(b'"a"') < text.index(b'"b"')


def test_a_stream_that_queues_is_kept_open_and_then_answered(impatient):
    with impatient.stream(script(token_latency=0.05), max_tokens=4000) as running:
        running.take(1)
        waiting = impatient.stream(script(tokens=["x"]))
        assert next(waiting.lines()).startswith(b":")
        running.close()
        with waiting:
            *chunks, done = waiting.events()
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["x", ""]
    assert done == "[DONE]"


def test_what_fails_after_the_comments_is_an_error_event(impatient):
    with impatient.stream(script(error_at=1, prefill_steps=4, prefill_latency=0.2)) as reader:
        events = list(reader.events())
    assert [event if isinstance(event, str) else event["error"]["code"] for event in events] == [
        "engine_error",
        "[DONE]",
    ]


def test_a_chat_that_is_kept_open_while_it_renders_is_rendered_once(serve, tmp_path):
    """Rendering takes longer than ``keepalive_after``: the comments must not begin it anew each time."""
    template = tmp_path / "slow.jinja"
    template.write_text(
        '{% for a in range(1200) %}{% for b in range(300) %}{% endfor %}{% endfor %}!fake {"echo": true}'
    )
    server = serve(fake(chat_template=str(template)) | {"keepalive_after": 0.01})
    answers = [server.begin("hi", path=CHAT, stream=True) for _ in range(3)]
    for pending in answers:
        with pending.events() as reader:
            *_, done = reader.events()
            assert done == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_the_connection_serves_on_after_an_answer_and_after_an_error(server, stream):
    connection = server.connect()
    good, bad = b'{"prompt":"hi","max_tokens":2,"stream":%s}', b'{"prompt":"hi","max_tokens":-1,"stream":%s}'
    failing = b'{"prompt":"!fake {\\"error_at\\": 2, \\"token_latency\\": 0.2}","stream":%s}'
    flag = b"true" if stream else b"false"
    try:
        connection.connect()
        sock = connection.sock
        for body, status in ((good, 200), (bad, 400), (failing, 200 if stream else 500), (good, 200)):
            connection.request("POST", COMPLETIONS, body % flag)
            response = connection.getresponse()
            assert response.status == status
            response.read()
            assert connection.sock is sock, "the connection was closed"
    finally:
        connection.close()


@PATHS
@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_clients_get_an_unchunked_answer_and_the_connections_end(server, path, stream):
    start = b'{"prompt":"hi",' if path == COMPLETIONS else b'{"messages":[{"role":"user","content":"hi"}],'
    body = start + (b'"max_tokens":2,"stream":true}' if stream else b'"max_tokens":2}')
    with server.raw(post(body, path=path, version="1.0")) as sock:
        head, _, rest = receive_all(sock).partition(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0]
    assert b"chunked" not in head.lower()
    if stream:
        assert rest.startswith(b"data: ")
        assert rest.endswith(b"data: [DONE]\n\n")
    else:
        assert rest.endswith(b"}")


def test_every_chunk_is_whole_events(server):
    """A reader that takes a network chunk for an event is wrong, but common, and need not be hurt."""
    with server.raw(post(b'{"prompt":"hi","max_tokens":200,"stream":true}', more="Connection: close\r\n")) as sock:
        _, _, rest = receive_all(sock).partition(b"\r\n\r\n")
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        chunk, rest = rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        assert not chunk or (chunk.startswith((b"data: ", b":")) and chunk.endswith(b"\n\n"))


def test_thirty_streams_at_once_all_come_to_their_end(server):
    pending = [server.begin("hi", stream=True, max_tokens=50) for _ in range(30)]
    for one in pending:
        with one.events() as reader:
            assert len(list(reader.events())) == 52
    wait_until(lambda: server.metric("inflight_requests", model="fake") == 0, "nothing is in flight")
