"""An engine dies, in whatever way and at whatever moment: who is told what, and that nothing of it is left."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from tests.faults.leftovers import Leftovers, ended_once
from tests.faults.planted import plant
from tests.serving import fake, script, wait_until

ENDLESS = script(token_latency=0.01)


def run(server):
    """An endless stream that has begun."""
    reader = server.stream(ENDLESS, max_tokens=900_000)
    reader.take(2)
    return reader


def assert_in_band(reader):
    """An error event, then [DONE], and the connection is at its end."""
    *_, error, done = reader.events()
    assert (error["error"]["code"], done) == ("engine_crashed", "[DONE]")


def test_a_killed_engines_streams_are_told_in_band_its_queue_is_served_and_the_other_replica_loses_no_token(serve):
    server = serve(fake(slots=1, replicas=2, context=1_000_000) | {"log_json": True})
    leftovers = Leftovers(server)
    lost = run(server)
    victim = 0 if server.replica(0)["sequences"] else 1
    kept = server.stream(script(token_latency=0.01), max_tokens=150)
    kept.take(1)
    queued = [server.begin(script(tokens=[letter])) for letter in "ab"]
    server.wait_queued(2)

    server.kill_engine(victim)

    assert_in_band(lost)
    assert [one.answer().text for one in queued] == ["a", "b"]
    *chunks, done = kept.events()
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "".join(f" tok{n}" for n in range(1, 150))
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    wait_until(lambda: server.replica(victim)["restarts"] == 1, "the lost one is started again")
    ended_once(server, 4)
    leftovers.assert_none()


WAYS_TO_DIE = {
    signal.SIGUSR1: "exited with 0",
    signal.SIGUSR2: "exited with 3",
    signal.SIGSEGV: "was ended by SIGSEGV",
    signal.SIGABRT: "was ended by SIGABRT",
    signal.SIGBUS: "was ended by SIGBUS",
    signal.SIGFPE: "was ended by SIGFPE",
}


@pytest.mark.slow
def test_however_an_engine_ends_the_reason_is_in_the_log_the_metric_and_the_list_of_replicas(serve, tmp_path):
    """An exit with 0 that nobody asked for is a death like any other."""
    server = serve(fake(load_time=0.3, context=1_000_000) | {"log_json": True}, **plant(tmp_path))
    leftovers = Leftovers(server)
    for number, (way, words) in enumerate(WAYS_TO_DIE.items(), 1):
        server.admin("/admin/models/fake/load", "POST")  # earlier deaths do not count
        with run(server) as stream:
            server.kill_engine(number=way)
            assert_in_band(stream)
        seen = wait_until(
            lambda: (one := server.replica())["reason"] and one["state"] != "ready" and one, "its reason is shown"
        )
        assert words in seen["reason"]
        (line,) = (one for one in server.records("an engine is lost", kind="exited") if words in one["reason"])
        assert line["replica"] == "fake/0"
        assert server.metric("engine_restarts_total", reason="exited") == number
        server.wait_ready()
    leftovers.assert_none()


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS])
def test_a_memory_fault_during_prefill_costs_that_request_nothing_but_time(serve, number):
    server = serve(fake(slots=1))
    leftovers = Leftovers(server)
    pending = server.begin(script(prefill_steps=20, prefill_latency=0.05, tokens=["x"]), stream=True)
    server.wait_sequences(1)
    server.kill_engine(number=number)
    with pending.events() as reader:
        *chunks, done = reader.events()
    assert ("".join(chunk["choices"][0]["text"] for chunk in chunks), done) == ("x", "[DONE]")
    leftovers.assert_none()


def test_two_engines_that_die_in_the_same_instant_are_two_deaths_and_both_come_back(serve):
    server = serve(fake(slots=1, replicas=2, context=1_000_000))
    leftovers = Leftovers(server)
    streams = [run(server), run(server)]
    waiting = server.begin("hi", max_tokens=1)
    server.wait_queued(1)
    os.kill(server.process.pid, signal.SIGSTOP)  # so that the front finds both at once
    for pid in [child.pid for child in server.children() if "slimproc.engines" in child.cmdline()]:
        os.kill(pid, signal.SIGKILL)
    os.kill(server.process.pid, signal.SIGCONT)
    for stream in streams:
        assert_in_band(stream)
    assert waiting.answer().status == 200
    wait_until(lambda: [one["restarts"] for one in server.replicas()] == [1, 1], "both are started again")
    leftovers.assert_none()


def test_an_engine_that_dies_while_it_drains_ends_the_drain_and_the_model_can_be_loaded_again(serve):
    server = serve(fake(context=1_000_000))
    leftovers = Leftovers(server)
    with run(server) as stream:
        server.admin("/admin/models/fake/unload", "POST")
        wait_until(lambda: server.replica()["state"] == "draining", "it drains")
        server.kill_engine()
        assert_in_band(stream)
    wait_until(lambda: server.replica()["state"] == "stopped", "it is down, and is not started again")
    assert server.replica()["restarts"] == 0
    assert server.complete("hi", max_tokens=1).status == 200
    leftovers.assert_none()


@pytest.mark.slow
def test_engines_killed_as_soon_as_they_exist_cost_their_waiters_nothing_they_were_not_told(serve):
    """Five rounds: the first replacement is at once, so every second death is that of a newborn."""
    server = serve(fake())
    leftovers = Leftovers(server)
    for _ in range(5):
        server.admin("/admin/models/fake/load", "POST")
        old = server.kill_engine()
        newborn = wait_until(lambda pid=old: (now := server.replica()["pid"]) not in (None, pid) and now, "another")
        os.kill(newborn, signal.SIGKILL)
        answer = server.complete("hi", max_tokens=1)
        assert answer.status in (200, 503)
        assert answer.status == 200 or answer.error["code"] == "service_unavailable"
        server.wait_ready()
        assert not any(psutil.pid_exists(pid) for pid in (old, newborn))
    leftovers.assert_none()
