"""``POST /infer?model=`` through a whole server, with a stand-in for a model's server in a process of its own."""

from __future__ import annotations

import hashlib
import http.client
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.serving import CHAT, ServerProcess, fake, wait_until
from tests.upstream.standin import standin_process

MIB = 1 << 20


def remote(url: str, **settings: Any) -> dict[str, Any]:
    """A model whose server is simply there."""
    usual = {"remote": {"base_url": url, "contract": "none"}, "inference_path": "/align", "max_body": "1GiB"}
    return usual | settings


def script_of(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url + "/script", timeout=30) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def standin() -> Iterator[str]:
    with standin_process(state="ready") as url:
        yield url


@pytest.fixture(scope="module")
def infer(standin: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A remote model with an alias, and a local one that answers chats."""
    models = {"fa": remote(standin, aliases=["aligner", "org/m:Q4_K_M"]), **fake(slots=4)["models"]}
    with ServerProcess(tmp_path_factory.mktemp("infer"), {"models": models, "log_json": True}) as server:
        yield server.wait_ready()


def flat(answer: Any) -> tuple[int, str]:
    assert answer.headers["Content-Type"] == "application/json"
    assert list(answer.json)[:3] == ["error", "src", "code"]
    assert answer.json["src"] == "slimproc"
    return answer.status, answer.json["code"]


def test_the_body_and_the_other_parameters_arrive_unchanged_at_the_models_path(infer):
    body = b'--B\r\nContent-Disposition: form-data; name="f"\r\n\r\n\x00\xff\r\n--B--\r\n'
    for name in ("fa", "aligner", "org%2Fm%3AQ4_K_M"):
        answer = infer.post(
            f"/infer?lang=de%20x&model={name}&n=1", body, Content_Type="multipart/form-data; boundary=B", X_Own="1"
        )
        assert (answer.status, answer.body) == (200, body)
        assert (answer.headers["X-Method"], answer.headers["X-Path"]) == ("POST", "/align")
        assert answer.headers["X-Query"] == "lang=de%20x&n=1"
        seen = {name.lower(): value for name, value in json.loads(answer.headers["X-Headers"]).items()}
        assert seen["content-type"] == "multipart/form-data; boundary=B"
        assert seen["x-own"] == "1"
        assert seen["x-request-id"] == answer.headers["x-request-id"]


def test_what_the_models_server_refuses_passes_through(infer):
    answer = infer.post("/infer?model=fa&status=422", b"theirs", Content_Type="text/plain")
    assert (answer.status, answer.body, answer.headers["Content-Type"]) == (422, b"theirs", "text/plain")


def test_a_local_model_answers_its_endpoint_and_the_bodys_own_model_does_not_count(infer):
    body = {"model": "qwen3.8-27b", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    answer = infer.post("/infer?model=fake", body)
    assert (answer.status, answer.json["object"], answer.json["model"]) == (200, "chat.completion", "fake")
    assert flat(infer.post("/infer?model=fake", b"{")) == (400, "BAD_REQUEST")


def test_errors_of_the_route_are_flat(infer):
    assert flat(infer.post("/infer", b"x")) == (400, "BAD_REQUEST")
    assert flat(infer.post("/infer?model=nope", b"x")) == (404, "NOT_FOUND")
    assert flat(infer.get("/infer?model=fa")) == (405, "METHOD_NOT_ALLOWED")


def test_openais_routes_reach_it_by_the_bodys_model(infer):
    body = b'{"model":"fa", "messages": []}'
    answer = infer.post(CHAT, body)
    assert (answer.status, answer.body, answer.headers["X-Path"]) == (200, body, CHAT)
    assert infer.chat("hi", model="fake", max_tokens=1).status == 200
    assert infer.chat("hi", model="nope").error["code"] == "model_not_found"


def test_a_streamed_answer_comes_as_it_is_made_and_one_that_breaks_off_has_no_end(infer):
    connection = infer.connect()
    connection.request("POST", "/infer?model=fa&chunks=5&delay=0.01&cut=3", b"x")
    answer = connection.getresponse()
    assert answer.status == 200
    with pytest.raises(http.client.IncompleteRead) as caught:
        answer.read()
    assert caught.value.partial == b"chunk 0\nchunk 1\nchunk 2\n"


def test_a_client_that_leaves_cancels_the_request_there(infer, standin):
    before = script_of(standin)["broken_off"]
    connection = infer.connect()
    connection.request("POST", "/infer?model=fa&delay=60", b"x")
    wait_until(lambda: script_of(standin)["active_requests"] == 1, "it is forwarded")
    connection.close()
    wait_until(lambda: script_of(standin)["broken_off"] == before + 1, "it is broken off")
    assert infer.post("/infer?model=fa", b"next").body == b"next"


def test_the_metrics_and_the_log_have_it(infer):
    before = infer.metric("requests_total", model="fa", outcome="ok")
    answer = infer.post("/infer?model=fa", b"hello", X_Request_Id="for-the-log")
    assert answer.status == 200
    infer.wait_metric(before + 1, "requests_total", model="fa", outcome="ok")
    (line,) = wait_until(lambda: infer.records("request forwarded", request_id="for-the-log"), "its line is there")
    assert (line["model"], line["outcome"], line["status"]) == ("fa", "ok", 200)
    assert (line["bytes_in"], line["bytes_out"]) == (5, 5)


def test_the_list_says_how_a_remote_model_stands(infer):
    answer = infer.get("/v1/models").json
    assert answer["queue_depth"] == 0
    found = {model["id"]: model["status"] for model in answer["data"]}
    assert found["fa"]["state"] == "ready"
    assert set(found["fa"]) == {
        "value", "state", "ready", "residency", "reason", "reserved_bytes", "last_error", "remote_state",
    }  # fmt: skip


@pytest.mark.parametrize("size", [256, pytest.param(1024, marks=pytest.mark.slow)], ids="{} MiB".format)
def test_a_large_upload_passes_whole_and_in_bounded_memory(infer, size):
    """Read by nobody faster than the models' server takes it."""
    memory = psutil.Process(infer.process.pid)
    before, most = memory.memory_info().rss, 0
    connection = infer.connect()
    connection.putrequest("POST", "/infer?model=fa&count=1")
    connection.putheader("Content-Length", str(size * MIB))
    connection.endheaders()
    piece = bytes(MIB)
    for _ in range(size):
        connection.send(piece)
        most = max(most, memory.memory_info().rss)
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (200, str(size * MIB).encode())
    assert most - before < 32 * MIB


@pytest.mark.parametrize("chunked", [False, True], ids=["with its length", "chunked"])
def test_a_large_form_passes_whole_while_it_is_made(infer, chunked):
    """96 MiB of a recording between two fields, in pieces whose borders have nothing to do with the form's."""
    count = 96
    recording = [hashlib.sha256(b"%d" % place).digest() * (MIB // 32) for place in range(count)]
    head = (
        b'--B0\r\nContent-Disposition: form-data; name="language"\r\n\r\nde\r\n'
        b'--B0\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
    )
    tail = b'\r\n--B0\r\nContent-Disposition: form-data; name="words"\r\n\r\n\xe2\x80\xa6\r\n--B0--\r\n'
    connection = infer.connect()
    headers = {"Content-Type": "multipart/form-data; boundary=B0"}
    if not chunked:
        headers["Content-Length"] = str(len(head) + count * MIB + len(tail))
    pieces = (piece[place : place + 700_001] for piece in (head, *recording, tail) for place in range(0, MIB, 700_001))
    connection.request("POST", "/infer?model=fa&parts=1", filter(None, pieces), headers, encode_chunked=chunked)
    answer = connection.getresponse()
    assert answer.status == 200
    language, file, words = json.loads(answer.read())
    digest = hashlib.sha256(b"".join(recording)).hexdigest()
    assert language[::3] == ["language", 2]
    assert file == ["file", "a.wav", "audio/wav", count * MIB, digest]
    assert words[::3] == ["words", 3]


def test_a_large_answer_comes_back_byte_for_byte(infer):
    body = b"".join(hashlib.sha256(b"%d" % place).digest() for place in range(500_000))
    assert infer.post("/infer?model=fa", body).body == body


def test_what_waits_is_bounded_and_goes_in_order(serve, standin):
    server = serve({"models": {"fa": remote(standin)}, "max_queue_total": 1})
    held = server.connect()
    held.request("POST", "/infer?model=fa&delay=60", b"x")
    wait_until(lambda: script_of(standin)["active_requests"] == 1, "it is forwarded")
    waiting = server.connect()
    waiting.request("POST", "/infer?model=fa", b"second")
    server.wait_metric(1, "queue_depth", model="fa")
    refused = server.post("/infer?model=fa", b"third")
    assert flat(refused) == (429, "QUEUE_FULL")
    assert int(refused.headers["Retry-After"]) >= 1
    held.close()
    assert waiting.getresponse().read() == b"second"


def test_a_server_that_is_not_there_is_told_and_comes_back(serve):
    with standin_process(state="ready") as url:
        port = int(url.rpartition(":")[2])
        server = serve({"models": {"fa": remote(url)}, "queue_timeout": 5.0})
        assert server.post("/infer?model=fa", b"x").status == 200
    status, code = flat(server.post("/infer?model=fa", b"x"))
    assert (status, code) in {(502, "BACKEND"), (502, "LOAD_FAILED"), (504, "QUEUE_TIMEOUT")}
    with standin_process(port=port, state="ready"):
        wait_until(lambda: server.post("/infer?model=fa", b"x").status == 200, "it serves again")
