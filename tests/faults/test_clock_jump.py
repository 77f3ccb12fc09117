"""The wall clock jumps by a day, again and again: no timer of any kind comes early or late."""

from __future__ import annotations

import time

import pytest

from tests.serving import fake, script, wait_until

pytestmark = pytest.mark.slow

JUMPING = """
import random, time

_real, _jump = time.time, random.Random(24)
time.time = lambda: _real() + _jump.choice((-86400.0, 86400.0))
"""
MIB = 1 << 20


@pytest.fixture
def jumping(serve, tmp_path):
    """A server of whose processes each sees a wall clock that jumps with every look: it is looked at before anything else."""
    (tmp_path / "sitecustomize.py").write_text(JUMPING)

    def start(config, **options):
        server = serve(config | {"log_json": True}, PYTHONPATH=str(tmp_path), **options)
        model = next(iter(config["models"]))
        days = {server.complete("hi", model=model, max_tokens=1).json["created"] // 86_400 for _ in range(16)}
        assert max(days) - min(days) == 2, "the clock does jump"
        assert "sitecustomize" not in server.log, "in no process has it failed to be planted"
        return server

    return start


def model():
    return {"backend": "fake", "fake": {"bytes": 700 * MIB, "token_latency": 0.02}}


def test_ttls_evictions_back_off_and_stalls_keep_their_times_while_the_clock_jumps(jumping):
    config = {
        "memory": {"margin": 0, "host_limit": 1000 * MIB},
        "stall_timeout": 2,
        "models": {"a": model(), "b": model() | {"ttl": 1}},
    }
    server = jumping(config)
    with server.stream("hi", model="a", max_tokens=50) as stream:  # a drain, with its limit a day away
        stream.take(1)
        waiting = server.begin("hi", model="b", max_tokens=2)
        *_, last, done = stream.events()
    assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
    assert waiting.answer().status == 200
    ended = time.monotonic()
    wait_until(lambda: server.replica(1)["state"] == "stopped", "its ttl has passed")
    assert time.monotonic() - ended > 0.7
    assert server.complete("hi", model="a", max_tokens=2).status == 200
    server.kill_engine(0)
    wait_until(lambda: server.replica(0)["restarts"] == 1 and server.replica(0)["state"] == "ready", "back at once")
    answer = server.complete(script(hang_at=2), model="a")
    assert (answer.status, answer.error["code"]) == (500, "engine_crashed")
    assert all(line["duration_ms"] >= 0 for line in server.records("generation finished"))
    assert server.stop() == 0


def test_a_drain_that_runs_out_of_time_does_so_when_it_is_due_while_the_clock_jumps(jumping):
    """Who waits for the memory is told after the limit and not before, and who runs goes on."""
    config = {
        "memory": {"margin": 0, "host_limit": 1000 * MIB},
        "drain_timeout": 2,
        "models": {"a": model() | {"context": 100_000}, "b": model()},
    }
    server = jumping(config)
    with server.stream("hi", model="a", max_tokens=90_000) as stream:
        stream.take(1)
        asked = time.monotonic()
        answer = server.complete("hi", model="b", max_tokens=2)
        assert 1.8 < time.monotonic() - asked < 20
        assert answer.status == 504
        assert len(stream.take(3)) == 3


def test_a_jump_does_not_stop_a_fake_model_that_loads(jumping):
    server = jumping(fake(load_time=1, load_timeout=20))
    assert server.replica()["restarts"] == 0
