"""The hot paths and their floors under pytest-benchmark, for whoever works on one of them:

    python -m pytest tests/speed --benchmark-enable --benchmark-only --benchmark-group-by=param:name

`make test` runs in several processes, where pytest-benchmark measures nothing and each is done once: it shows that they
work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.speed.guard import HotPath
from tests.speed.hot_paths import hot_paths
from tests.speed.test_speed_guard import NAMES


@pytest.fixture(scope="module")
def paths() -> Iterator[dict[str, HotPath]]:
    with hot_paths() as found:
        yield found


@pytest.mark.parametrize("side", ["ours", "floor"])
@pytest.mark.parametrize("name", NAMES)
def test_a_hot_path_beside_its_floor(benchmark: Any, paths: dict[str, HotPath], name: str, side: str) -> None:
    benchmark(getattr(paths[name], side))
