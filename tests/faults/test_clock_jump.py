"""The wall clock jumps by a day, again and again: no timer of any kind comes early or late."""

from __future__ import annotations

import time

from tests.serving import fake, script, wait_until

JUMPING = """
import random, time

pytestmark = pytest.mark.slow
_real, _jump = time.time, random.Random(24)
time.time = lambda: _real() + _jump.choice((-86400.0, 86400.0))
"""
MIB = 1 << 20


def model():
    return {"backend": "fake", "fake": {"bytes": 700 * MIB, "token_latency": 0.02}}


def test_ttls_evictions_back_off_and_stalls_keep_their_times_while_the_clock_jumps(serve, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(JUMPING)
    config = {
        "memory": {"margin": 0, "host_limit": 1000 * MIB},
        "stall_timeout": 2,
        "models": {"a": model(), "b": model() | {"ttl": 1}},
        "log_json": True,
    }
    server = serve(config, PYTHONPATH=str(tmp_path))
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


def test_a_jump_does_not_stop_a_fake_model_that_loads(serve, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(JUMPING)
    server = serve(fake(load_time=1, load_timeout=20), PYTHONPATH=str(tmp_path))
    assert server.replica()["restarts"] == 0
