"""No hot path has become twice as slow against its floor; and the guard would notice if one had."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

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


def test_a_path_that_has_become_twice_as_slow_is_caught(paths: dict[str, HotPath]) -> None:
    """With the limit that follows from what the path is here and now, whatever machine this is."""
    path = paths["admission decision"]
    now = min(ratio(path.ours, path.floor) for _ in range(3))
    slow = replace(path, ours=lambda: (path.ours(), path.ours()), limit=1.5 * now)
    with pytest.raises(AssertionError, match="admission decision"):
        check(slow)
