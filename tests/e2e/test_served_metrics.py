"""``/metrics`` after traffic that is known to the last token."""

from __future__ import annotations

import re

import pytest

from tests.serving import ServerProcess, fake, script

SLOW = script(token_latency=0.01)


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    """A server after one request of every kind."""
    with ServerProcess(tmp_path_factory.mktemp("busy"), fake(slots=1, max_queue=0, context=100_000)) as server:
        server.wait_ready()
        for _ in range(3):
            assert server.complete("abcd", max_tokens=5).status == 200
        with server.stream(script(tokens=["x"], repeat=10, token_latency=0.01), max_tokens=100) as reader:
            assert len(list(reader.events())) == 12
        assert server.complete("hi", max_tokens=-1).status == 400
        assert server.complete("hi", model="nope-\u00fc").status == 404
        assert server.get("/nowhere").status == 404
        assert server.begin(SLOW, headers={"x-request-timeout": "0.2"}, max_tokens=90_000).answer().status == 504
        server.wait_idle()  # the only slot is free when the engine has stopped, a moment after the answer
        assert server.complete(script(error_at=1)).status == 500
        running = server.begin(SLOW, stream=True, max_tokens=90_000)
        server.wait_sequences(1)
        assert server.metric("inflight_requests", model="fake") == 1
        assert server.complete("hi").status == 503
        running.close()
        server.wait_idle()
        server.wait_metric(1, "requests_total", outcome="cancelled")
        yield server


@pytest.mark.parametrize(
    ("outcome", "count"),
    [("ok", 4), ("timeout", 1), ("cancelled", 1), ("engine_error", 1), ("engine_crashed", 0), ("shutdown", 0)],
)
def test_every_admitted_request_is_counted_by_its_outcome(busy, outcome, count):
    assert busy.metric("requests_total", model="fake", outcome=outcome) == count


@pytest.mark.parametrize(
    ("model", "reason", "count"),
    [("fake", "overloaded", 1), ("", "invalid", 1), ("fake", "unavailable", 0), ("fake", "shutting_down", 0)],
)
def test_a_refused_request_is_counted_as_rejected_alone(busy, model, reason, count):
    """A body that is refused unread has no model."""
    assert busy.metric("rejected_total", model=model, reason=reason) == count


def test_a_name_that_nobody_configured_is_no_label(busy):
    assert busy.metric("rejected_total", model="", reason="not_found") == 1
    assert b"nope" not in busy.get("/metrics").body


def test_durations_are_of_successes_only(busy):
    assert busy.metric("request_duration_seconds_count", model="fake") == 4


def test_waits_and_first_tokens_are_of_all_that_had_them(busy):
    assert busy.metric("queue_wait_seconds_count", model="fake") == 7
    assert busy.metric("time_to_first_token_seconds_count", model="fake") == 6
    assert busy.metric("decode_tokens_per_second_count", model="fake") == 4


def test_tokens_are_counted_exactly(busy):
    tokens = busy.metric("generated_tokens_total", model="fake")
    assert tokens == busy.replica()["tokens"] > 3 * 5 + 10
    assert busy.metric("prompt_tokens_total", model="fake") >= 3 * 2
    assert busy.metric("cached_prompt_tokens_total", model="fake") == 0


def test_gauges_say_what_is_now(busy):
    assert busy.metric("queue_depth", model="fake") == 0
    assert busy.metric("inflight_requests", model="fake") == 0
    assert busy.metric("replicas", model="fake", state="ready") == 1
    assert busy.metric("replicas", model="fake", state="failed") == 0


def test_loads_and_restarts_are_there_from_the_start(busy):
    assert busy.metric("model_loads_total", outcome="ok") == 1
    assert busy.metric("model_loads_total", outcome="failed") == 0
    assert busy.metric("model_load_seconds_count") == 1
    assert busy.metric("engine_restarts_total", reason="exited") == 0


def test_the_text_is_prometheus_format(busy):
    answer = busy.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain")
    for line in answer.body.decode().splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) slimproc_\w+ .+|slimproc_\w+(\{\w+="[^"]*"(,\w+="[^"]*")*\})? \S+', line), (
            line
        )


def test_a_stream_observes_the_time_between_its_tokens(busy):
    before = busy.metric("inter_token_seconds_count", model="fake")
    with busy.stream(script(tokens=["x"], repeat=10, token_latency=0.01), max_tokens=100) as reader:
        list(reader.events())
    assert busy.metric("inter_token_seconds_count", model="fake") == before + 9
