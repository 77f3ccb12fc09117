"""A wall clock that jumps days back and forth changes nothing but ``created`` and the times in the log."""

from __future__ import annotations

import pytest

from tests.serving import ServerProcess, fake, script, wait_until

JUMPING = """
import random, time
_real, _jump = time.time, random.Random(1)
time.time = lambda: _real() + _jump.choice((-86400.0, 0.0, 86400.0))
"""


@pytest.fixture(scope="module")
def jumping(tmp_path_factory):
    """A server whose processes all see a wall clock that jumps with every look."""
    directory = tmp_path_factory.mktemp("jumping")
    (directory / "sitecustomize.py").write_text(JUMPING)
    config = fake(slots=1, context=100_000) | {"stall_timeout": 5, "keepalive_after": 5, "log_json": True}
    with ServerProcess(directory, config, PYTHONPATH=str(directory)) as process:
        yield process.wait_ready()


def test_the_clock_does_jump(jumping):
    created = {jumping.complete("hi", max_tokens=1).json["created"] // 86_400 for _ in range(8)}
    assert len(created) > 1


def test_nothing_expires_early_while_it_queues_or_runs(jumping):
    slow = script(tokens=["x"], repeat=30, token_latency=0.02)
    pending = [jumping.begin(slow, max_tokens=100, headers={"x-request-timeout": "25"}) for _ in range(3)]
    assert [one.answer().text for one in pending] == ["x" * 30] * 3


def test_a_deadline_comes_when_it_is_due(jumping):
    answer = jumping.begin(script(token_latency=0.01), max_tokens=90_000, headers={"x-request-timeout": "0.5"}).answer()
    assert answer.status == 504
    jumping.wait_idle()


def test_no_time_that_was_measured_is_negative_or_days_long(jumping):
    jumping.wait_idle()
    for metric in ("queue_wait_seconds", "time_to_first_token_seconds", "request_duration_seconds"):
        assert 0 <= jumping.metric(f"{metric}_sum", model="fake") < 600
    for line in wait_until(lambda: jumping.records("generation finished"), "generation lines"):
        assert 0 <= line["duration_ms"] < 60_000
        assert 0 <= line["queue_wait_ms"] < 60_000


def test_an_engine_is_replaced_and_a_shutdown_ends_in_time(jumping):
    jumping.kill_engine()
    assert jumping.complete("hi", max_tokens=1).status == 200
    assert jumping.stop() == 0
