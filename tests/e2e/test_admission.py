"""Who may start, who waits, and who is refused, seen from outside."""

from __future__ import annotations

import pytest

from tests.serving import CHAT, COMPLETIONS, ServerProcess, fake, script, wait_until

ENDLESS = script(token_latency=0.01)


def occupy(server, count: int = 1):
    """Requests that each hold a slot until they are closed."""
    held = [server.begin(ENDLESS, stream=True, max_tokens=900_000) for _ in range(count)]
    wait_until(lambda: sum(one["sequences"] for one in server.replicas()) == count, f"{count} run")
    return held


def assert_overloaded(answer):
    assert answer.status == 503
    assert answer.error["code"] == "overloaded"
    assert 1 <= int(answer.headers["Retry-After"]) <= 60
    assert answer.headers["Content-Type"] == "application/json"


def test_what_does_not_fit_the_queue_is_refused_at_once_and_the_rest_is_served_in_order(serve):
    server = serve(fake(slots=1, max_queue=4, context=1_000_000) | {"log_json": True})
    (running,) = occupy(server)
    tokens = [script(tokens=[letter]) for letter in "abcd"]
    waiting = []
    for place, prompt in enumerate(tokens):
        waiting.append(server.begin(prompt, headers={"x-request-id": f"w{place}"}))
        server.wait_queued(place + 1)
    for path in (COMPLETIONS, CHAT):
        for stream in (False, True):
            assert_overloaded(server.begin(script(die_at=1), path=path, stream=stream).answer())
    assert_overloaded(server.begin(script(die_at=1)).answer())
    assert server.metric("rejected_total", model="fake", reason="overloaded") == 5
    running.close()
    assert [one.answer().text for one in waiting] == list("abcd")
    finished = server.records("generation finished", outcome="ok")
    assert [line["request_id"] for line in finished] == ["w0", "w1", "w2", "w3"]
    server.wait_idle()
    assert server.replica()["restarts"] == 0, "a refused request never touches the engine"
    (held,) = occupy(server)
    held.close()


def test_with_max_queue_zero_only_what_can_start_at_once_is_taken(serve):
    server = serve(fake(slots=2, max_queue=0, context=1_000_000))
    first, second = occupy(server, 2)
    for stream in (False, True):
        assert_overloaded(server.begin("hi", stream=stream).answer())
    first.close()
    server.wait_sequences(1)
    assert server.complete("hi", max_tokens=1).status == 200
    second.close()


def test_a_request_of_more_sequences_than_are_free_is_one_that_waits(serve):
    server = serve(fake(slots=2, max_queue=1, context=1_000_000))
    (running,) = occupy(server)
    wide = server.begin([script(tokens=["x"])] * 5, n=2)
    assert wide.answer().json["usage"]["completion_tokens"] == 10
    running.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two models of one slot each, for which no more than two requests wait together."""
    models = {name: {"backend": "fake", "slots": 1, "context": 1_000_000} for name in ("a", "b")}
    with ServerProcess(tmp_path_factory.mktemp("pair"), {"models": models, "max_queue_total": 2}) as process:
        yield process.wait_ready()


def test_the_queues_of_all_models_together_have_a_limit(pair):
    pair.wait_idle()
    running = [pair.begin(ENDLESS, model=name, max_tokens=900_000) for name in ("a", "b")]
    pair.wait_sequences(1, 1)
    waiting = [pair.begin("hi", model="a") for _ in range(2)]
    pair.wait_queued(2, "a")
    assert_overloaded(pair.begin("hi", model="b").answer())
    for one in running:
        one.close()
    assert [one.answer().status for one in waiting] == [200, 200]


def test_replicas_run_in_parallel_with_one_sequence_a_slot(serve):
    server = serve(fake(slots=1, replicas=2, context=1_000_000))
    held = occupy(server, 2)
    server.wait_sequences(1, 1)
    waiting = server.begin("hi", max_tokens=1)
    server.wait_queued(1)
    assert [one["sequences"] for one in server.replicas()] == [1, 1]
    held[0].close()
    assert waiting.answer().status == 200
    held[1].close()


def test_one_models_queue_is_not_in_anothers_way(pair):
    pair.wait_idle()
    running = pair.begin(ENDLESS, model="a", max_tokens=900_000)
    pair.wait_sequences(1, 0)
    waiting = pair.begin("hi", model="a")
    pair.wait_queued(1, "a")
    assert pair.complete("hi", model="b").status == 200
    running.close()
    assert waiting.answer().status == 200


@pytest.fixture(scope="module")
def queueless(tmp_path_factory):
    """One slot, and nobody waits for it."""
    config = fake(slots=1, max_queue=0, context=1_000_000)
    with ServerProcess(tmp_path_factory.mktemp("queueless"), config) as process:
        yield process.wait_ready()


def test_what_is_wrong_is_refused_as_wrong_even_when_the_queue_is_full(queueless):
    queueless.wait_idle()
    (running,) = occupy(queueless)
    assert queueless.complete("hi", max_tokens=-1).status == 400
    assert queueless.complete("hi", model="nope").status == 404
    running.close()


def test_a_body_that_trickles_in_holds_no_slot(queueless):
    queueless.wait_idle()
    with queueless.raw(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{"prom') as slow:
        assert queueless.complete("hi", max_tokens=1).status == 200
        assert slow


def test_the_refusal_of_an_overloaded_server_leaves_the_connection_usable(queueless):
    queueless.wait_idle()
    (running,) = occupy(queueless)
    connection = queueless.connect()
    connection.request("POST", COMPLETIONS, b'{"prompt":"hi","stream":true}')
    response = connection.getresponse()
    assert (response.status, len(response.read()) > 0) == (503, True)
    running.close()
    queueless.wait_idle()
    connection.request("POST", COMPLETIONS, b'{"prompt":"hi"}')
    assert connection.getresponse().read().endswith(b"}")


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_burst_far_beyond_the_slots_is_served_whole(serve, replicas):
    server = serve(fake(slots=2, replicas=replicas, max_queue=100))
    pending = [server.begin(script(tokens=[str(number)], repeat=3)) for number in range(60)]
    assert [one.answer().text for one in pending] == [str(number) * 3 for number in range(60)]
    server.wait_idle()
    assert server.metric("requests_total", outcome="ok") == 60


def test_a_deadline_for_which_those_ahead_leave_no_time_is_refused_at_once(serve):
    server = serve(fake(slots=1))
    work = script(tokens=["a", "b", "c", "d"], token_latency=0.05)
    for _ in range(3):
        assert server.complete(work).status == 200
    ahead = [server.begin(work) for _ in range(17)]
    server.wait_queued(16)
    refused = server.begin(work, headers={"X-Request-Timeout": "1"}).answer()
    assert_overloaded(refused)
    assert "this request has" in refused.error["message"]
    assert server.metric("requests_total", outcome="timeout") == 0
    patient = server.begin(work)
    for one in [*ahead, patient]:
        assert one.answer().status == 200
