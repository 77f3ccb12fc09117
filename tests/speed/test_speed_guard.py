"""No hot path has become twice as slow against its floor; and the guard would notice if one had."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from slimproc import errors
from slimproc.http.exposition import Exposition
from slimproc.metrics import Metrics
from tests.speed.guard import TRIES, HotPath, check, ratio
from tests.speed.hot_paths import hot_paths

NAMES = ("ring", "wire", "admission decision", "SSE encoding", "front")


@pytest.fixture(scope="module")
def paths() -> Iterator[dict[str, HotPath]]:
    with hot_paths() as found:
        assert set(found) == set(NAMES)
        yield found


@pytest.mark.parametrize("name", NAMES)
def test_a_hot_path_keeps_its_distance_from_its_floor(paths: dict[str, HotPath], name: str) -> None:
    check(paths[name])


@pytest.mark.parametrize("name", NAMES)
def test_a_path_that_does_its_work_twice_measures_twice_as_slow(paths: dict[str, HotPath], name: str) -> None:
    """So that a guard above cannot be blind: what it measures is the path, and not the harness round it."""
    path = paths[name]

    def twice() -> None:
        path.ours()
        path.ours()

    assert any(1.7 < ratio(twice, path.ours) < 2.4 for _ in range(TRIES))


def fast(_: HotPath) -> float:
    return 1.0


def test_a_path_above_its_limit_in_every_try_fails_with_all_of_them() -> None:
    path = HotPath("x", list, list, limit=1.5)
    seen = iter([1.6, 3.0, 2.0, 1.7])
    with pytest.raises(AssertionError, match=r"x: 1\.60, 3\.00, 2\.00, 1\.70 times its floor, and at most 1\.5"):
        check(path, lambda _: next(seen))
    assert check(path, fast) == 1.0


def test_one_try_within_the_limit_is_enough_on_a_machine_that_was_disturbed() -> None:
    seen = iter([9.0] * (TRIES - 1) + [1.2])
    assert check(HotPath("x", list, list, limit=1.5), lambda _: next(seen)) == 1.2


@pytest.mark.parametrize("name", NAMES)
def test_a_path_that_has_become_twice_as_slow_is_caught(paths: dict[str, HotPath], name: str) -> None:
    """Else its limit says nothing any more, since the path, or this machine, has become so much faster."""
    path = paths[name]
    slow = replace(path, ours=lambda: (path.ours(), path.ours()))
    with pytest.raises(AssertionError, match=name):
        check(slow)


SCRAPE = 1.5
"""Of a scrape's cost after much traffic to that of one before any: more digits, and nothing else."""


def used(metrics: Metrics) -> Metrics:
    """As after a hundred thousand requests, a tenth of them for models that nobody has."""
    model = metrics.model("m")
    for number in range(100_000):
        model.queue_wait.observe(number / 1000)
        model.ttft.observe(number / 700)
        model.inter_token.begin(number * 1000, 8)
        model.generated_tokens += 8
        model.requests["ok"] += 1
        if number % 10 == 0:
            metrics.reject(f"m{number}", errors.ModelNotFound("no such model", param="model"))
    return metrics


def test_a_scrape_costs_as_much_after_much_traffic_as_before() -> None:
    fresh, later = Exposition(Metrics(["m"])), Exposition(used(Metrics(["m"])))
    check(HotPath("scrape", later.render, fresh.render, SCRAPE))


def test_a_scrape_that_grows_would_be_caught() -> None:
    fresh, grown = Exposition(Metrics(["m"])), Exposition(Metrics(f"m{number}" for number in range(4)))
    with pytest.raises(AssertionError, match="scrape"):
        check(HotPath("scrape", grown.render, fresh.render, SCRAPE))
