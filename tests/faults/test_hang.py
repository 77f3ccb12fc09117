"""An engine that lives and does nothing: alive means steps done."""

from __future__ import annotations

import signal

import psutil
import pytest

from tests.faults.leftovers import Leftovers
from tests.faults.planted import plant
from tests.serving import fake, script, wait_until

WAYS_TO_HANG = {
    "stopped": signal.SIGSTOP,
    "spinning in Python": signal.SIGWINCH,
    "keeping the interpreter in a native call": signal.SIGURG,
}


@pytest.mark.parametrize("way", WAYS_TO_HANG)
def test_an_engine_that_makes_no_step_is_killed_whatever_it_does_instead_and_then_it_is_as_after_a_death(
    serve, tmp_path, way
):
    server = serve(fake(slots=1, context=1_000_000) | {"stall_timeout": 1, "log_json": True}, **plant(tmp_path))
    leftovers = Leftovers(server)
    with server.stream(script(token_latency=0.01), max_tokens=900_000) as stream:
        stream.take(2)
        queued = server.begin(script(tokens=["next"]))
        server.wait_queued(1)
        pid = server.kill_engine(number=WAYS_TO_HANG[way])
        *_, error, done = stream.events()
    assert (error["error"]["code"], done) == ("engine_crashed", "[DONE]")
    assert queued.answer().text == "next"
    assert not psutil.pid_exists(pid)
    assert server.metric("engine_restarts_total", reason="stalled") == 1
    (line,) = server.records("an engine is lost", kind="stalled")
    assert "no step in 1 s with 1 sequences" in line["reason"]
    leftovers.assert_none()


def test_an_engine_that_answers_questions_and_steps_but_makes_nothing_is_a_hanging_one(serve):
    """Beats are no progress: neither steps that come to nothing nor what it says in between help it."""
    server = serve(fake(slots=1) | {"stall_timeout": 2, "log_json": True})
    leftovers = Leftovers(server)
    pid = server.replica()["pid"]
    with server.stream(script(spin=3, token_latency=0.01)) as stream:
        stream.take(2)
        for _ in range(5):
            assert server.post("/tokenize", {"content": "hi"}).json["tokens"], "it lives, and says so"
        assert server.replica()["pid"] == pid
        *_, error, done = stream.events()
    assert (error["error"]["code"], done) == ("engine_crashed", "[DONE]")
    wait_until(lambda: not psutil.pid_exists(pid), "it was killed and reaped")
    assert server.records("an engine is lost", kind="stalled")
    leftovers.assert_none()


def test_who_makes_nothing_beside_somebody_who_does_costs_nobody_his_engine(serve):
    """One sequence that is not served is no reason to end the others: its own deadline is for that."""
    server = serve(fake(slots=2, context=1_000_000) | {"stall_timeout": 0.5})
    pid = server.replica()["pid"]
    with server.stream(script(token_latency=0.01), max_tokens=900_000) as well:
        well.take(1)
        headers = {"x-request-timeout": "2"}
        assert server.begin(script(spin=1), headers=headers).answer().status == 504
        assert len(well.take(3)) == 3
    assert (server.replica()["pid"], server.replica()["restarts"]) == (pid, 0)


@pytest.mark.slow
def test_a_long_prefill_is_not_a_hang_and_neither_is_a_long_load(serve):
    server = serve(fake(slots=1, load_time=2) | {"stall_timeout": 0.8})
    pid = server.replica()["pid"]
    answer = server.complete(script(prefill_steps=10, prefill_latency=0.2, tokens=["x"]))
    assert answer.text == "x"
    assert (server.replica()["pid"], server.replica()["restarts"]) == (pid, 0)


def test_an_engine_that_hangs_while_nobody_asks_anything_is_found_by_the_first_who_does(serve):
    server = serve(fake(slots=1) | {"stall_timeout": 1})
    leftovers = Leftovers(server)
    pid = server.kill_engine(number=signal.SIGSTOP)
    assert server.complete(script(tokens=["x"])).text == "x", "it had no byte yet, so that the next engine answers"
    assert not psutil.pid_exists(pid)
    leftovers.assert_none()
