"""Engines that die, hang or fail: what their own requests get, what everybody else notices, and what comes after."""

from __future__ import annotations

import signal

import psutil
import pytest

from tests.serving import CHAT, COMPLETIONS, fake, script, wait_until

ENDLESS = script(token_latency=0.01)


def assert_failed_in_stream(events, code):
    """An error event, then [DONE], and no finish reason before them."""
    *chunks, error, done = events
    assert done == "[DONE]"
    assert error["error"]["code"] == code
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
    return error["error"]


def take_running(server, path=COMPLETIONS):
    reader = server.stream(ENDLESS, path=path, max_tokens=900_000)
    reader.take(3)
    return reader


@pytest.mark.parametrize("path", [COMPLETIONS, pytest.param(CHAT, marks=pytest.mark.slow)])
def test_an_engine_killed_in_mid_stream_gives_that_client_an_error_and_the_next_an_answer(serve, path):
    server = serve(fake(context=1_000_000))
    with take_running(server, path) as reader:
        pid = server.kill_engine()
        error = assert_failed_in_stream(list(reader.events()), "engine_crashed")
    assert "SIGKILL" in error["message"]
    assert server.complete("hi", max_tokens=2).text == " tok0 tok1"
    assert server.replica()["pid"] != pid
    assert server.replica()["restarts"] == 1
    assert server.metric("engine_restarts_total", reason="exited") == 1
    assert server.metric("requests_total", outcome="engine_crashed") == 1
    assert server.get("/healthz").status == 200


def test_a_joined_answer_that_had_begun_is_made_anew_for_its_client_has_no_byte_of_it(serve):
    server = serve(fake())
    tokens = server.replica()["tokens"]
    pending = server.begin(script(token_latency=0.02), max_tokens=50)
    wait_until(lambda: server.replica()["tokens"] > tokens + 3, "tokens come")
    server.kill_engine()
    assert pending.answer().text == "".join(f" tok{number}" for number in range(50))


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_request_that_had_no_token_yet_is_started_once_more_and_answered(serve, stream):
    server = serve(fake(slots=1, context=1_000_000))
    pending = server.begin(script(prefill_steps=20, prefill_latency=0.05), stream=stream, max_tokens=2)
    server.wait_sequences(1)
    queued = server.begin(script(tokens=["q"]), stream=stream)
    server.wait_queued(1)
    server.kill_engine()
    for one, text in ((pending, " tok0 tok1"), (queued, "q")):
        if stream:
            with one.events() as reader:
                *chunks, done = reader.events()
            assert done == "[DONE]"
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
        else:
            assert one.answer().text == text
    assert server.replica()["restarts"] == 1


@pytest.mark.parametrize("stream", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_request_that_kills_its_engine_twice_is_not_tried_a_third_time(serve, stream):
    server = serve(fake())
    answer = server.begin(script(die_at=1, signal=int(signal.SIGSEGV)), stream=stream).answer()
    assert (answer.status, answer.error["code"]) == (500, "engine_crashed")
    assert "SIGSEGV" in answer.error["message"]
    assert answer.headers["x-should-retry"] == "false", "an SDK's own retries would kill it again and again"
    assert server.complete("hi", max_tokens=1).status == 200
    assert server.metric("engine_restarts_total", reason="exited") == 2


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_error_in_the_engine_stays_in_its_request(server, path):
    with server.stream(script(tokens=["a"], repeat=100, token_latency=0.01), max_tokens=200) as other:
        other.take(1)
        for stream in (False, True):
            answer = server.begin(script(error_at=1), path=path, stream=stream).answer()
            assert (answer.status, answer.error["code"]) == (500, "engine_error")
        answer = server.begin(script(error_at=3), path=path).answer()
        assert (answer.status, answer.error["code"]) == (500, "engine_error")
        with server.stream(script(error_at=3, token_latency=0.2), path=path) as reader:
            assert reader.status == 200
            assert_failed_in_stream(list(reader.events()), "engine_error")
        *_, last, done = other.events()
    assert (last["choices"][0]["finish_reason"], done) == ("stop", "[DONE]")
    assert server.replica()["restarts"] == 0
    server.wait_idle()


def test_one_choice_that_fails_ends_the_whole_request(server):
    answer = server.complete([ENDLESS, script(error_at=2)], max_tokens=4000)
    assert (answer.status, answer.error["code"]) == (500, "engine_error")
    server.wait_idle()


def test_another_replicas_streams_are_not_touched(serve):
    server = serve(fake(slots=1, replicas=2, context=1_000_000))
    readers = {}
    for count in (1, 2):
        reader = take_running(server)
        wait_until(lambda n=count: sum(one["sequences"] for one in server.replicas()) == n, "it runs")
        readers[count] = reader
    killed = server.replica(0)["pid"]
    server.kill_engine(0)
    with readers[1] as lost, readers[2] as kept:
        assert_failed_in_stream(list(lost.events()), "engine_crashed")
        assert len(kept.take(50)) == 50
        assert server.get("/readyz").status == 200
    wait_until(lambda: server.replica(0)["state"] == "ready", "the lost one comes back")
    assert server.replica(0)["pid"] != killed
    assert server.replica(1)["restarts"] == 0


def test_an_engine_killed_while_idle_is_replaced_without_anybody_asking(serve):
    server = serve(fake())
    pid = server.kill_engine()
    wait_until(lambda: server.replica()["pid"] not in (pid, None) and server.replica()["state"] == "ready", "a new one")
    assert not psutil.pid_exists(pid), "it was reaped"
    assert server.complete("hi", max_tokens=1).status == 200


def test_a_stopped_engine_is_caught_by_its_steps_and_killed(serve):
    server = serve(fake(context=1_000_000) | {"stall_timeout": 1})
    with take_running(server) as reader:
        pid = server.kill_engine(number=signal.SIGSTOP)
        error = assert_failed_in_stream(list(reader.events()), "engine_crashed")
    assert "no step" in error["message"]
    wait_until(lambda: not psutil.pid_exists(pid), "it was killed and reaped")
    assert server.complete("hi", max_tokens=1).status == 200
    assert server.metric("engine_restarts_total", reason="stalled") == 1


def test_an_engine_that_hangs_in_a_step_is_killed(serve):
    server = serve(fake() | {"stall_timeout": 0.5})
    with server.stream(script(hang_at=3)) as reader:
        assert_failed_in_stream(list(reader.events()), "engine_crashed")
    assert server.complete("hi", max_tokens=1).status == 200


@pytest.mark.slow
def test_an_engine_that_always_dies_is_given_up_after_few_tries_and_an_operator_can_start_it(serve):
    server = serve(fake(die_in_load=9), wait=False)
    server.wait_metric(1, "replicas", state="failed")
    ready = server.get("/readyz")
    assert ready.status == 503
    assert ready.json["status"] == "failed"
    assert "SIGKILL" in ready.json["models"]["fake"]["reason"]
    assert server.get("/healthz").status == 200
    for stream in (False, True):
        answer = server.complete("hi", stream=stream)
        assert (answer.status, answer.error["code"]) == (503, "service_unavailable")
        assert "SIGKILL" in answer.error["message"]
        assert answer.headers["Retry-After"]
    assert server.metric("model_loads_total", outcome="failed") == 5
    assert server.metric("rejected_total", model="fake", reason="unavailable") == 2
    server.admin("/admin/models/fake/load", "POST")
    wait_until(lambda: server.metric("model_loads_total", outcome="failed") > 5, "it is tried again")


def test_a_load_that_fails_tells_those_who_wait_and_those_who_come_at_once(serve):
    server = serve(fake(load_time=0.5, load_error="no such tensor"), wait=False)
    waiting = server.begin("hi")
    answer = waiting.answer()
    assert (answer.status, answer.error["code"]) == (503, "service_unavailable")
    assert "no such tensor" in answer.error["message"]
    wait_until(lambda: server.replica()["state"] == "backoff" and server.replica()["restarts"] >= 2, "a long back-off")
    tries = server.replica()["restarts"]
    assert server.complete("hi").status == 503
    assert server.replica()["restarts"] == tries, "the answer did not wait for the next try"


@pytest.mark.slow
def test_no_engine_leaves_a_descriptor_a_process_or_memory_behind(serve):
    server = serve(fake(slots=1))
    front = psutil.Process(server.process.pid)
    wait_until(lambda: any("probes" in " ".join(child.cmdline()) for child in server.children()), "the probe is there")
    open_files, children = front.num_fds(), len(server.children())
    for _ in range(3):
        pid = server.kill_engine()
        wait_until(lambda old=pid: server.replica()["pid"] not in (old, None), "back")
        server.wait_ready()
        assert server.complete("hi", max_tokens=1).status == 200
    wait_until(lambda: front.num_fds() <= open_files, "the descriptors are closed")
    assert len(server.children()) == children
    assert not any(child.status() == psutil.STATUS_ZOMBIE for child in server.children())
