"""One model's memory is wanted for another while it answers: its streams are whole, and nobody is kept waiting for ever."""

from __future__ import annotations

import pytest

from tests.faults.leftovers import ended_once
from tests.serving import script, wait_until

pytestmark = pytest.mark.slow

MIB = 1 << 20


def of_size(megabytes):
    return {"backend": "fake", "slots": 4, "context": 1_000_000, "fake": {"bytes": megabytes * MIB, "unload_time": 0.3}}


def config(**settings):
    memory = {"margin": 0, "host_limit": 1000 * MIB}
    return {"memory": memory, "models": {"a": of_size(700), "b": of_size(700)}, "log_json": True, **settings}


def held(server):
    return server.metric("memory_bytes", device="host", kind="held")


def states(server):
    return {one["model"]: one["state"] for one in server.replicas()}


def test_streams_of_the_evicted_model_end_whole_and_the_other_is_loaded_when_its_bytes_are_back(serve):
    server = serve(config(preload=["a"]))
    told = script(tokens=["x"], repeat=60, token_latency=0.02)
    streams = [server.stream(told, model="a", max_tokens=100) for _ in range(3)]
    for stream in streams:
        stream.take(1)
    waiting = [server.begin(script(tokens=["y"]), model="b") for _ in range(4)]
    wait_until(lambda: states(server)["a"] == "draining", "it makes room")
    for stream in streams:
        *chunks, done = stream.events()
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "x" * 59
        assert (chunks[-1]["choices"][0]["finish_reason"], done) == ("stop", "[DONE]")
    assert [one.answer().text for one in waiting] == ["y"] * 4
    assert held(server) == 700 * MIB, "never both"
    changes = [(one["replica"], one["after"]) for one in server.records("a replica changes")]
    assert changes.index(("a/0", "stopped")) < changes.index(("b/0", "starting")), "only when its bytes were back"
    assert server.metric("evictions_total", model="a") == 1
    ended_once(server, 7)


def test_who_waits_for_a_model_that_never_gets_room_is_told_at_the_drain_limit_and_who_runs_runs_on(serve):
    server = serve(config(preload=["a"], drain_timeout=1))
    with server.stream(script(token_latency=0.01), model="a", max_tokens=900_000) as stream:
        stream.take(1)
        waiting = [server.begin("hi", model="b", stream=stream_) for stream_ in (True, False)]
        answers = [one.answer() for one in waiting]
        assert [(one.status, one.error["code"]) for one in answers] == [(504, "timeout")] * 2
        assert len(stream.take(5)) == 5
        wait_until(lambda: states(server) == {"a": "ready", "b": "stopped"}, "it takes new work again")
        assert server.complete(script(tokens=["x"]), model="a").text == "x"
        assert held(server) == 700 * MIB
    assert server.complete(script(tokens=["y"]), model="b").text == "y"
