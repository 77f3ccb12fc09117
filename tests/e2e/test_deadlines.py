"""One deadline over queue, load, prefill and decode; whoever is past it is told, and its work stops."""

from __future__ import annotations

import pytest

from tests.serving import CHAT, ServerProcess, fake, script, wait_until

ENDLESS = script(token_latency=0.01)
SOON = {"x-request-timeout": "0.4"}


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    with ServerProcess(tmp_path_factory.mktemp("single"), fake(slots=1, context=1_000_000)) as process:
        yield process.wait_ready()


def assert_timeout(answer, where=""):
    assert answer.status == 504
    assert answer.error["code"] == "timeout"
    assert where in answer.error["message"]
    assert answer.headers["x-should-retry"] == "false"


def assert_free(server):
    """No sequence, and no token any more."""
    server.wait_idle()
    tokens = server.replica()["tokens"]
    assert server.complete("hi", max_tokens=2).status == 200
    assert server.replica()["tokens"] == tokens + 2


def test_a_deadline_while_generating_ends_the_request_and_frees_the_slot(single):
    before = single.metric("requests_total", outcome="timeout")
    assert_timeout(single.begin(ENDLESS, headers=SOON, max_tokens=900_000).answer(), "generating")
    assert_free(single)
    assert single.metric("requests_total", outcome="timeout") == before + 1


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_a_deadline_in_mid_stream_is_an_error_event_and_never_a_finish_reason(single, path):
    with single.begin(ENDLESS, path=path, headers=SOON, stream=True, max_tokens=900_000).events() as reader:
        assert reader.status == 200
        *chunks, error, done = reader.events()
    assert done == "[DONE]"
    assert error["error"]["code"] == "timeout"
    assert len(chunks) > 2
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert_free(single)


@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline_during_prefill_is_a_status_also_for_a_stream(single, stream):
    slow = script(prefill_steps=100_000, prefill_latency=0.01)
    assert_timeout(single.begin(slow, headers=SOON, stream=stream).answer(), "prefill")
    assert_free(single)


@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline_while_queued_skips_the_work(single, stream):
    running = single.begin(ENDLESS, stream=True, max_tokens=900_000)
    single.wait_sequences(1)
    assert_timeout(single.begin(script(die_at=1), headers=SOON, stream=stream).answer(), "waiting for a slot")
    single.wait_queued(0)
    running.close()
    assert_free(single)
    assert single.replica()["restarts"] == 0, "its script would have killed the engine"


def test_a_deadline_is_kept_though_the_engine_is_stuck(serve):
    server = serve(fake(slots=1) | {"stall_timeout": 60, "cancel_grace": 60})
    assert_timeout(server.begin(script(hang_at=2), headers=SOON).answer())
    assert_timeout(server.begin("hi", headers=SOON).answer(), "waiting for a slot")


def test_an_engine_that_does_not_stop_for_a_cancelled_request_is_replaced(serve):
    server = serve(fake(slots=1) | {"stall_timeout": 60, "cancel_grace": 0.3})
    waiting = server.begin("hi", max_tokens=1)
    assert waiting.answer().status == 200
    pid = server.replica()["pid"]
    assert_timeout(server.begin(script(hang_at=2), headers=SOON).answer())
    assert server.complete("hi", max_tokens=1).status == 200
    assert server.replica()["pid"] != pid
    assert server.metric("engine_restarts_total", reason="stalled") == 1


def test_a_deadline_during_the_models_load(serve):
    server = serve(fake(load_time=20), wait=False)
    for stream in (False, True):
        assert_timeout(server.begin("hi", headers=SOON, stream=stream).answer(), "waiting")


def test_the_models_own_limit_holds_and_a_caller_can_only_shorten_it(serve):
    server = serve(fake(request_timeout=0.5, context=1_000_000))
    assert_timeout(server.begin(ENDLESS, max_tokens=900_000).answer())
    assert_timeout(server.begin(ENDLESS, max_tokens=900_000, headers={"x-request-timeout": "60"}).answer())


def test_a_long_answer_within_its_limit_is_not_cut(single):
    prompt = script(tokens=["x"], repeat=20, token_latency=0.03)
    answer = single.begin(prompt, headers={"x-request-timeout": "25"}, max_tokens=100).answer()
    assert answer.text == "x" * 20


@pytest.mark.parametrize("limit", ["soon", "-1", "0", "nan", "inf", "", "1e400"])
def test_a_time_limit_that_is_none_is_refused(single, limit):
    answer = single.begin("hi", headers={"x-request-timeout": limit}).answer()
    assert (answer.status, answer.error["param"]) == (400, "X-Request-Timeout")


def test_every_choice_of_a_request_stops_at_its_deadline(serve):
    server = serve(fake(slots=2, context=1_000_000))
    assert_timeout(server.begin([ENDLESS] * 5, headers=SOON, max_tokens=900_000).answer())
    server.wait_idle()
    wait_until(lambda: server.metric("inflight_requests", model="fake") == 0, "nothing is in flight")
    assert_free(server)
