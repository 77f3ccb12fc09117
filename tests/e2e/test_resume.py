"""``on_crash: resume``: a stream whose engine dies goes on in the same answer, where that is safe, and says so."""

from __future__ import annotations

import json
import signal

import pytest

from tests.serving import fake, script, wait_until

SLOW = script(token_latency=0.02)


def resuming(**settings):
    settings = {"context": 100_000, "on_crash": "resume", **settings}
    return fake(**settings) | {"log_json": True}


def text_of(chunks):
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def numbers(count):
    return "".join(f" tok{number}" for number in range(count))


def test_a_killed_engines_stream_goes_on_in_another_replica_without_a_token_lost_or_said_twice(serve):
    server = serve(resuming(replicas=2))
    with server.stream(SLOW, max_tokens=60, stream_options={"include_usage": True}) as reader:
        assert reader.headers["X-Slimproc-On-Crash"] == "resume"
        chunks = reader.take(5)
        server.kill_engine(0 if server.replica(0)["sequences"] else 1)
        *rest, usage, done = reader.events()
    chunks += rest
    assert done == "[DONE]"
    assert text_of(chunks) == numbers(60)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"][0]["finish_reason"]] == [
        "length"
    ]
    assert usage["usage"]["completion_tokens"] == 60
    assert usage["usage"]["prompt_tokens"] == server.complete(SLOW, max_tokens=1).json["usage"]["prompt_tokens"]
    assert server.metric("resumes_total", result="resumed") == 1
    assert server.metric("resumes_total", result="refused") == 0
    assert server.metric("requests_total", outcome="ok") == 2
    (record,) = server.records("generation finished", resumed=1)
    assert (record["outcome"], record["completion_tokens"]) == ("ok", 60)


def test_with_one_replica_it_waits_for_its_restart_and_a_comment_says_why(serve):
    server = serve(resuming())
    with server.stream(SLOW, max_tokens=30) as reader:
        reader.take(3)
        server.kill_engine()
        lines = list(reader.lines())
    assert any(line.startswith(b": the engine died") for line in lines)
    assert lines[-2:] == [b"data: [DONE]", b""]


def test_it_goes_on_as_often_as_it_gets_further(serve):
    server = serve(resuming())
    chunks = []
    with server.stream(SLOW, max_tokens=120) as reader:
        for _ in range(3):
            server.admin("/admin/models/fake/load", "POST")  # no back-off
            chunks += reader.take(10)
            server.kill_engine()
        *rest, done = reader.events()
    assert done == "[DONE]"
    assert text_of(chunks + rest) == numbers(120)
    assert server.metric("resumes_total", result="resumed") == 3


def test_a_chat_with_two_choices_goes_on_with_both(serve):
    server = serve(resuming(slots=2))
    body = {"messages": [{"role": "user", "content": SLOW}], "n": 2, "max_tokens": 40, "stream": True, "model": "fake"}
    connection = server.connect()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    said = ["", ""]
    killed = False
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            said[choice["index"]] += choice["delta"].get("content", "")
        if not killed and all(text.count("tok") > 3 for text in said):
            killed = bool(server.kill_engine())
    connection.close()
    assert said == [numbers(40)] * 2
    assert server.metric("resumes_total", result="resumed") == 2


def test_stop_strings_hold_over_the_seam(serve):
    server = serve(resuming())
    with server.stream(SLOW, max_tokens=500, stop=["k25 "]) as reader:
        chunks = reader.take(5)
        server.kill_engine()
        chunks += [event for event in reader.events() if event != "[DONE]"]
    assert text_of(chunks) == numbers(25) + " to"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "why"),
    [({"logprobs": 1}, "logprobs"), ({"echo": True}, "echo"), ({"seed": 7, "temperature": 1}, "seed")],
)
def test_where_it_is_not_safe_the_header_says_so_and_the_stream_ends_with_an_error(serve, fields, why):
    server = serve(resuming())
    with server.stream(SLOW, max_tokens=500, **fields) as reader:
        assert reader.headers["X-Slimproc-On-Crash"] == f"fail; {why}"
        reader.take(3)
        server.kill_engine()
        *_, error, done = reader.events()
    assert (error["error"]["code"], done) == ("engine_crashed", "[DONE]")
    server.wait_metric(1, "resumes_total", result="refused")
    assert server.metric("resumes_total", result="resumed") == 0


def test_without_the_setting_nothing_is_said_and_nothing_goes_on(serve):
    server = serve(fake(context=100_000))
    with server.stream(SLOW, max_tokens=500) as reader:
        assert "X-Slimproc-On-Crash" not in reader.headers
        reader.take(3)
        server.kill_engine()
        *_, error, _ = reader.events()
    assert error["error"]["code"] == "engine_crashed"
    assert server.metric("resumes_total", result="refused") == 0


def test_a_stream_that_kills_each_engine_at_the_same_place_costs_two(serve):
    server = serve(resuming())
    killer = script(die_at=4, token_latency=0.02, signal=int(signal.SIGSEGV))
    with server.stream(killer, max_tokens=50) as reader:
        *chunks, error, done = reader.events()
    assert text_of(chunks) == numbers(3)
    assert (error["error"]["code"], done) == ("engine_crashed", "[DONE]")
    wait_until(lambda: server.replica()["state"] == "ready", "it is back")
    assert server.metric("engine_restarts_total", reason="exited") == 2
    assert server.complete("hi", max_tokens=1).status == 200


def test_a_client_that_leaves_while_its_stream_waits_to_go_on_is_forgotten(serve):
    server = serve(resuming(load_time=0.5))
    reader = server.stream(SLOW, max_tokens=500)
    reader.take(3)
    server.kill_engine()
    reader.close()
    server.wait_metric(1, "requests_total", outcome="cancelled")
    server.wait_ready()
    server.wait_idle()
