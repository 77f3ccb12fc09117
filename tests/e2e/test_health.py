"""Liveness and readiness: true at every moment of a server's life, and cheap."""

from __future__ import annotations

import pytest

from tests.serving import fake, script, wait_until


def test_liveness_answers_at_once_and_readiness_says_what_is_missing_during_a_load(serve):
    server = serve(fake(load_time=3), wait=False)
    assert server.get("/healthz").json == {"status": "ok"}
    alive = server.get("/health")
    assert (alive.status, alive.body) == (200, b"")
    ready = server.get("/readyz")
    assert ready.status == 503
    assert ready.json["status"] == "loading"
    assert ready.json["models"]["fake"]["ready"] is False
    assert 0 <= ready.json["models"]["fake"]["progress"] < 1
    assert server.get("/v1/models/fake").json["status"]["value"] == "loading"
    wait_until(lambda: server.get("/readyz").json["models"]["fake"].get("progress", 1) > 0.2, "the load progresses")
    waiting = server.begin("hi", max_tokens=1)
    server.wait_ready()
    assert waiting.answer().status == 200
    assert server.get("/readyz").json["models"]["fake"]["status"] == "ready"
    assert server.get("/v1/models/fake").json["status"]["value"] == "loaded"


def test_requests_can_be_refused_while_their_model_loads(serve):
    server = serve(fake(load_time=5.0) | {"while_loading": "refuse"}, wait=False)
    for stream in (False, True):
        answer = server.complete("hi", stream=stream)
        assert (answer.status, answer.error["code"]) == (503, "service_unavailable")
        assert "loading" in answer.error["message"]
        assert int(answer.headers["Retry-After"]) >= 1
    server.wait_ready()
    assert server.complete("hi", max_tokens=1).status == 200


def test_a_failed_load_leaves_the_server_up_and_says_why(serve):
    models = {"good": {"backend": "fake"}, "bad": {"backend": "fake", "fake": {"load_error": "cut off at byte 12"}}}
    server = serve({"models": models}, wait=False)
    wait_until(lambda: server.get("/readyz").json["models"]["bad"].get("reason"), "the cause is known")
    ready = server.get("/readyz")
    assert ready.status == 503
    assert "cut off at byte 12" in ready.json["models"]["bad"]["reason"]
    assert server.get("/healthz").status == 200
    wait_until(lambda: server.get("/readyz").json["models"]["good"]["ready"], "the good one serves")
    assert server.complete("hi", model="good", max_tokens=1).status == 200


def test_load_does_not_change_readiness(serve):
    server = serve(fake(slots=1, max_queue=0, context=1_000_000))
    running = server.begin(script(token_latency=0.01), stream=True, max_tokens=900_000)
    server.wait_sequences(1)
    assert server.complete("hi").status == 503
    assert server.get("/readyz").status == 200
    running.close()


def test_readiness_goes_with_the_last_engine_and_comes_back(serve):
    server = serve(fake(load_time=1))
    server.kill_engine()
    wait_until(lambda: server.get("/readyz").status == 503, "nobody can serve")
    assert server.get("/healthz").status == 200
    server.wait_ready()


@pytest.mark.parametrize("path", ["/health", "/healthz", "/readyz", "/metrics", "/v1/models", "/v1/models/fake"])
def test_head_is_get_without_its_body(server, path):
    got, head = server.get(path), server.request("HEAD", path)
    assert (head.status, head.body) == (got.status, b"")
    assert head.headers["Content-Type"] == got.headers["Content-Type"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH"])
def test_other_methods_are_405_with_what_is_allowed(server, path, method):
    answer = server.request(method, path)
    assert answer.status == 405
    assert answer.headers["Allow"] == "POST"
    assert method == "HEAD" or answer.error["code"] == "method_not_allowed"
    assert method != "HEAD" or answer.body == b""


def test_probes_answer_while_streams_run_flat_out(serve):
    server = serve(fake(slots=8, context=1_000_000))
    readers = [server.begin("hi", stream=True, max_tokens=900_000) for _ in range(4)]
    server.wait_sequences(4)
    for _ in range(5):
        assert server.get("/healthz").status == 200
        assert server.get("/readyz").status == 200
    for reader in readers:
        reader.close()
    server.wait_idle()
