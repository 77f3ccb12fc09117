"""RestartPolicy: how long a replica waits before it starts again, and when it gives up."""

from __future__ import annotations

import time

import pytest

from slimproc.replicas.restart import RestartPolicy


def policy(jitter: float = 0.5, **options) -> RestartPolicy:
    """A jitter of 0.5 is none: the wait as it was planned."""
    return RestartPolicy(jitter=lambda: jitter, **options)


def test_the_first_restart_is_at_once_and_each_wait_doubles_the_one_before():
    restarts = policy(limit=100)
    waits = [restarts.failed(float(second)) for second in range(10)]
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]


@pytest.mark.parametrize(("jitter", "factor"), [(0.0, 0.75), (0.5, 1.0), (1.0, 1.25)])
def test_jitter_moves_a_wait_by_a_quarter_at_most(jitter, factor):
    restarts = policy(jitter, limit=100)
    waits = [restarts.failed(0.0) for _ in range(9)]
    assert waits == [pytest.approx(factor * wait) for wait in (0, 1, 2, 4, 8, 16, 32, 60, 60)]


def test_real_jitter_differs_between_two_waits():
    restarts = RestartPolicy(limit=1000)
    restarts.failed(0.0)
    waits = {restarts.failed(0.0) for _ in range(50)}
    assert len(waits) > 40
    assert all(0.75 <= wait <= 75 for wait in waits)


def test_the_fifth_failure_in_five_minutes_gives_up():
    restarts = policy()
    assert [restarts.failed(now) for now in (0, 50, 100, 150, 299)] == [0, 1, 2, 4, None]


def test_what_lies_further_back_than_the_window_does_not_count():
    restarts = policy()
    waits = [restarts.failed(now) for now in (0, 50, 100, 150, 301)]
    assert waits == [0, 1, 2, 4, 4]
    assert restarts.failures == 4


def test_once_given_up_it_gives_up_again_until_the_window_has_passed():
    restarts = policy()
    for now in (0, 1, 2, 3, 4):
        restarts.failed(now)
    assert restarts.failed(64) is None
    assert restarts.failed(500) == 0


def test_loads_that_take_long_to_fail_are_given_up_after_as_many():
    restarts = policy()
    assert [restarts.failed(now, loading=True) for now in (120, 240, 361, 483, 607)] == [0, 1, 2, 4, None]
    assert restarts.failed(10_000, loading=True) is None, "a try that somebody asks for later is one try"


def test_deaths_of_days_ago_do_not_count_when_a_load_fails():
    restarts = policy()
    for now in (0, 50, 100, 150):
        restarts.failed(now)
    restarts.loaded()
    assert [restarts.failed(now, loading=True) for now in (300_000, 300_500)] == [0, 1]


def test_loads_that_fail_are_counted_anew_after_one_that_did_not():
    restarts = policy()
    for now in (0, 400, 800, 1200):
        restarts.failed(now, loading=True)
    restarts.loaded()
    assert [restarts.failed(now, loading=True) for now in (1600, 2000, 2400, 2800, 3200)] == [0, 1, 2, 4, None]


def test_deaths_and_loads_that_fail_count_together_within_the_window():
    restarts = policy()
    waits = []
    for now in (0, 20, 40, 60, 80):
        waits.append(restarts.failed(now, loading=now % 40 == 0))
        restarts.loaded()
    assert waits == [0, 1, 2, 4, None]


def test_a_server_that_is_not_ours_and_is_down_for_a_week_is_tried_every_minute():
    restarts = policy(endless=True)
    assert all(restarts.failed(60.0 * minute, loading=True) <= 60 for minute in range(10_000))


def test_a_permanent_failure_gives_up_at_once():
    assert policy().failed(0.0, permanent=True) is None


def test_a_minute_of_ready_and_a_finished_request_clear_the_count():
    restarts = policy()
    restarts.failed(0.0)
    restarts.failed(1.0)
    restarts.served(ready_since=10.0, now=70.0)
    assert restarts.failures == 0
    assert restarts.failed(71.0) == 0


def test_a_request_that_finishes_sooner_clears_nothing():
    restarts = policy()
    restarts.failed(0.0)
    restarts.served(ready_since=10.0, now=69.9)
    assert restarts.failures == 1


def test_an_operators_start_clears_the_count():
    restarts = policy()
    for now in range(5):
        restarts.failed(now)
    restarts.reset()
    assert restarts.failed(6.0) == 0


@pytest.mark.parametrize("day", [-86400.0, 86400.0])
def test_the_wall_clock_has_no_say(day, monkeypatch):
    """It counts instants that it is given; a clock that was set says nothing to it."""
    restarts = policy()
    restarts.failed(0.0)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + day)
    assert restarts.failed(1.0) == 1
    restarts.served(ready_since=1.0, now=2.0)
    assert restarts.failures == 2
