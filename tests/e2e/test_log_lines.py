"""What a running server writes: one line a request and one a generation, with one id, that nobody can forge."""

from __future__ import annotations

import http.client
import json
import re
import signal

import pytest

from tests.models import tiny_random
from tests.serving import ServerProcess, fake, script, wait_until
from tests.upstream.standin import standin_process

SECRET = "the-callers-secret-words"


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    with ServerProcess(tmp_path_factory.mktemp("logged"), fake(context=100_000) | {"log_json": True}) as process:
        yield process.wait_ready()


def lines_of(server, request_id):
    """(the access line, the generation line) of a request."""
    found = wait_until(lambda: server.records("request", request_id=request_id), "its access line")
    return found, server.records("generation finished", request_id=request_id)


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_has_one_access_line_and_one_generation_line_with_one_id(logged, stream):
    name = f"id-{stream}"
    pending = logged.begin("abcd", max_tokens=3, stream=stream, headers={"x-request-id": name})
    answer = pending.answer()
    assert answer.headers["x-request-id"] == name
    (access,), (generation,) = lines_of(logged, name)
    assert (access["method"], access["path"], access["status"]) == ("POST", "/v1/completions", 200)
    assert access["duration_ms"] >= generation["ttft_ms"] >= 0
    assert generation["outcome"] == "ok"
    assert generation["finish_reason"] == "length"
    assert (generation["prompt_tokens"], generation["completion_tokens"]) == (2, 3)
    assert generation["queue_wait_ms"] >= 0
    assert generation["duration_ms"] >= generation["ttft_ms"]
    assert (generation["model"], generation["replica"]) == ("fake", "fake/0")


def test_without_an_id_one_is_made_and_no_two_are_equal(logged):
    ids = {logged.complete("hi", max_tokens=1).headers["x-request-id"] for _ in range(5)}
    assert len(ids) == 5
    assert all(re.fullmatch(r"[0-9a-f]{32}", one) for one in ids)


@pytest.mark.parametrize("path", ["/healthz", "/nowhere", "/v1/models", "/v1/completions"])
def test_every_answer_carries_its_id(logged, path):
    for method in ("GET", "HEAD", "POST"):
        assert logged.request(method, path, None, {"x-request-id": "x.y-1"}).headers["x-request-id"] == "x.y-1"


@pytest.mark.parametrize("name", ["a b", "a\tb", "x" * 65, "", "\u00e9", '"', "a=b status=200", "\x1b[31m"])
def test_an_id_that_could_forge_a_line_is_replaced(logged, name):
    head = (
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nx-request-id: "
        + name.encode("latin-1")
        + b"\r\nConnection: close\r\n\r\n"
    )
    with logged.raw(head) as sock:
        received = b""
        while piece := sock.recv(65536):
            received += piece
    if received.startswith(b"HTTP/1.1 200"):
        (given,) = re.findall(rb"x-request-id: (.*)\r\n", received)
        assert re.fullmatch(rb"[0-9a-f]{32}", given)
    else:
        assert received.split()[1] == b"400", "a control character is no part of a header"


def test_paths_and_names_cannot_forge_lines(logged):
    before = len(logged.log.splitlines())
    logged.get("/%0a%0dHTTP%20forged")
    logged.get('/"\\%e9')
    logged.complete("hi", model='x\n{"message":"request","status":200}')
    wait_until(lambda: len(logged.log.splitlines()) >= before + 3, "three lines")
    for line in logged.log.splitlines():
        json.loads(line)
    assert all("duration_ms" in line for line in logged.records("request")), "each is one of ours"


def test_the_access_line_tells_why_a_request_was_refused_at_once(serve):
    """Each of the first three is 503."""
    slow = {"backend": "fake", "fake": {"load_time": 60}}
    config = fake(slots=1, max_queue=1, context=1_000_000) | {"while_loading": "refuse", "default_model": "fake"}
    config["models"]["slow"] = slow
    server = serve(config | {"log_json": True}, wait=False)
    wait_until(lambda: server.get("/readyz").json["models"]["fake"]["ready"], "one of them serves")

    def line_of(pending, name):
        assert pending.answer().status >= 400
        ((line,), _) = lines_of(server, name)
        return line["status"], line["code"], line["model"]

    def begin(name, prompt="hi", **fields):
        return server.begin(prompt, headers={"x-request-id": name}, **fields)

    running = begin("running", script(token_latency=0.01), stream=True, max_tokens=900_000)
    server.wait_sequences(1, 0)
    queued = begin("queued")
    server.wait_queued(1)
    assert line_of(begin("full"), "full") == (503, "overloaded", "fake")
    assert line_of(begin("loading", model="slow"), "loading") == (503, "service_unavailable", "slow")
    assert line_of(begin("unknown", model=SECRET), "unknown") == (404, "model_not_found", None)
    server.process.send_signal(signal.SIGTERM)
    assert line_of(queued, "queued") == (503, "shutting_down", "fake")
    running.close()
    assert SECRET not in server.log


def test_what_was_answered_has_a_model_and_no_code(logged):
    logged.begin("hi", max_tokens=1, headers={"x-request-id": "fine"}).answer()
    ((access,), _) = lines_of(logged, "fine")
    assert (access["model"], access["code"]) == ("fake", None)


def test_the_wait_for_a_load_is_a_part_of_the_wait_in_the_queue(serve):
    server = serve(fake(load_time=0.5) | {"preload": [], "log_json": True})
    for name in ("first", "second"):
        server.begin("hi", max_tokens=1, headers={"x-request-id": name}).answer()
    (_, (first,)), (_, (second,)) = lines_of(server, "first"), lines_of(server, "second")
    assert 0 < first["load_wait_ms"] <= first["queue_wait_ms"] <= first["ttft_ms"]
    assert second["load_wait_ms"] == 0


def test_a_prompt_and_an_answer_are_in_no_line(logged):
    logged.complete(SECRET, max_tokens=2, echo=True, stop=[SECRET + "!"], user=SECRET)
    logged.chat(SECRET, max_tokens=1)
    logged.post("/v1/completions", f'{{"prompt":"{SECRET}'.encode())
    logged.complete(f'!fake {{"tokens": ["{SECRET}"]}}')
    logged.complete(f'!fake {{"{SECRET}": 1}}')
    logged.complete(script(error_at=2) + "\n" + SECRET)
    logged.chat([{"type": SECRET}])
    logged.post("/tokenize", {"content": SECRET})
    logged.wait_idle()
    assert len(logged.records("generation finished")) >= 2
    assert SECRET not in logged.log


def formatted(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def test_nor_are_they_at_the_level_debug_whatever_is_forwarded_embedded_or_refused(tmp_path):
    """The query of ``/infer`` goes on to the model's server: it may be a prompt."""
    with standin_process(state="ready") as url:
        remote = {"remote": {"base_url": url, "contract": "none"}, "inference_path": "/align", "max_body": "1MiB"}
        config = {"models": fake()["models"] | {"x": remote}, "default_model": "fake", "log_level": "debug"}
        with ServerProcess(tmp_path, config | {"log_json": True}) as server:
            server.wait_ready()
            infer = f"/infer?model=x&prompt={SECRET}"
            assert server.post(infer, SECRET.encode()).headers["X-Query"] == f"prompt={SECRET}", "it is forwarded"
            assert server.post(infer + "&status=500", b"").status == 500
            with pytest.raises(http.client.IncompleteRead):
                server.post(infer + "&chunks=3&cut=1", b"")
            assert server.get(infer).status == 405
            assert server.post(f"/infer?model={SECRET}", b"").status == 404
            assert server.post(f"/infer?prompt={SECRET}", b"").status == 400
            assert server.post(f"/v1/completions?prompt={SECRET}", {"prompt": SECRET, "model": "x"}).status == 200
            assert server.post("/v1/embeddings", {"input": [SECRET]}).status == 200
            assert server.post("/v1/embeddings", {"input": [SECRET], "dimensions": SECRET}).status == 400
            assert server.chat(SECRET, response_format=formatted({"type": SECRET})).status == 400
            assert server.complete(script(error_at=1) + "\n" + SECRET).status == 500
            server.wait_idle()
            assert {line["path"] for line in server.records("request")} >= {"/infer", "/v1/completions"}
            assert SECRET not in server.log


def test_nor_is_a_schema_that_is_compiled_and_refused(tmp_path):
    path = tiny_random(tmp_path / "tiny.gguf")
    model = {"backend": "llama_cpp", "path": str(path), "threads": 1}
    config = {"models": {"m": model}, "log_level": "debug", "log_json": True}
    with ServerProcess(tmp_path / "server", config) as server:
        server.wait_ready()
        for schema in ({"type": SECRET}, {"type": "string", "pattern": "(" + SECRET}, {"$ref": "#/" + SECRET}):
            assert server.chat(SECRET, response_format=formatted(schema)).status == 400
        assert server.complete(SECRET, grammar=f"root ::= {SECRET} (").status == 400
        assert server.complete(SECRET, max_tokens=2).status == 200
        server.wait_idle()
        assert server.records("generation finished", outcome="ok")
        assert SECRET not in server.log


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_499_and_cancelled(logged, stream):
    name = f"left-{stream}"
    pending = logged.begin(script(token_latency=0.01), max_tokens=90_000, stream=stream, headers={"x-request-id": name})
    logged.wait_sequences(1)
    pending.close()
    (access,), (generation,) = lines_of(logged, name)
    assert access["status"] in ((200, 499) if stream else (499,))
    assert generation["outcome"] == "cancelled"


@pytest.mark.parametrize(
    ("prompt", "outcome", "status"),
    [
        (script(error_at=1), "engine_error", 500),
        ("x" * 300_000, "invalid", 400),
        (script(token_latency=5), "timeout", 504),
    ],
)
def test_what_fails_is_logged_with_its_outcome_and_reason(logged, prompt, outcome, status):
    name = f"fails-{outcome}"
    logged.begin(prompt, headers={"x-request-id": name, "x-request-timeout": "1.5"}).answer()
    (access,), (generation,) = lines_of(logged, name)
    assert access["status"] == status
    assert generation["outcome"] == outcome
    assert generation["reason"]
    assert generation["finish_reason"] == ""


def test_an_engines_last_words_and_death_are_logged(serve):
    server = serve(fake() | {"log_json": True})
    server.complete(script(die_at=1, signal=6))
    wait_until(lambda: server.records("an engine is lost"), "its death is told")
    assert "SIGABRT" in server.records("an engine is lost")[0]["reason"]
    assert "Fatal Python error: Aborted" in server.log, "its stderr is kept"


def test_text_lines_have_the_same_fields(serve):
    server = serve(fake())
    server.begin("abcd", max_tokens=2, headers={"x-request-id": "text-1"}).answer()
    wait_until(lambda: "path=/v1/completions" in server.log, "its access line")
    (generation,) = [line for line in server.log.splitlines() if "generation finished" in line]
    assert "request_id=text-1" in generation
    assert "finish_reason=length" in generation
    assert "completion_tokens=2" in generation
