"""Work that kills its engine: at most two engines die of it, however often and by however many it is asked for."""

from __future__ import annotations

import signal

import pytest

from tests.serving import fake, script, wait_until

KILLER = script(die_at=3, signal=int(signal.SIGSEGV))


@pytest.mark.parametrize(
    ("at", "stream"),
    [
        pytest.param(at, stream, marks=() if (at, stream) in ((0, True), (2, False)) else pytest.mark.slow)
        for at in (0, 1, 2, 5)
        for stream in (True, False)
    ],
    ids=lambda value: value if isinstance(value, bool) else f"token {value}" if value else "taken in",
)
def test_however_often_the_client_retries_two_engines_die(serve, at, stream):
    server = serve(fake())
    body = script(die_at=at, token_latency=0.02, signal=int(signal.SIGSEGV))
    for _ in range(5):
        server.begin(body, stream=stream).answer()
        wait_until(lambda: server.replica()["state"] == "ready", "it is back")
    answer = server.begin(body, stream=stream).answer()
    assert (answer.status, answer.error["code"]) == (500, "engine_crashed")
    assert "ten minutes" in answer.error["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert server.metric("engine_restarts_total", reason="exited") == 2
    assert server.metric("rejected_total", reason="poison") >= 3
    assert len([line for line in server.log.splitlines() if "poison:" in line]) == 1
    assert server.complete("hi", max_tokens=1).status == 200


def test_an_operators_load_of_the_model_forgets_what_is_poison(serve):
    server = serve(fake())
    assert server.begin(KILLER).answer().status == 500
    refused = server.begin(KILLER).answer()
    assert "ten minutes" in refused.error["message"]
    wait_until(lambda: server.replica()["state"] == "ready", "it is back")
    server.admin("/admin/models/fake/load", "POST")
    assert "ten minutes" not in server.begin(KILLER).answer().error["message"]
    assert server.metric("engine_restarts_total", reason="exited") == 4


def test_copies_at_once_and_many_choices_cost_two_engines_too(serve):
    server = serve(fake())
    pending = [server.begin(KILLER, n=2) for _ in range(4)]
    assert {one.answer().status for one in pending} == {500}
    wait_until(lambda: server.replica()["state"] == "ready", "it is back")
    assert server.metric("engine_restarts_total", reason="exited") == 2


def test_a_neighbour_of_a_killer_is_answered(serve):
    server = serve(fake(slots=2))
    neighbour = server.begin(script(prefill_steps=30, prefill_latency=0.02, tokens=["mine"]))
    server.wait_sequences(1)
    assert server.begin(KILLER).answer().status == 500
    assert neighbour.answer().text == "mine"
    assert server.metric("engine_restarts_total", reason="exited") == 2


def test_an_engine_killed_from_outside_makes_nothing_poison(serve):
    server = serve(fake(context=1_000_000))
    for _ in range(3):
        with server.stream(script(token_latency=0.05), max_tokens=900_000) as reader:
            assert reader.status == 200
            reader.take(2)
            server.kill_engine()
            list(reader.events())
        wait_until(lambda: server.replica()["state"] == "ready", "it is back")
    assert server.metric("rejected_total", reason="poison") == 0
