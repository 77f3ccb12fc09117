"""The ratio guard: what a hot path costs as a multiple of its floor, both measured in turns in this very run.

Never an absolute time: a slow or busy machine slows both sides. CPU time of this thread, so that waiting for a core does
not count; the least of many short turns, so that a disturbed turn does not; and more tries, for a machine that was
disturbed all through the first.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

TURNS = 40
TRIES = 4


@dataclass(frozen=True)
class HotPath:
    """``ours`` does the hot path's work for some hundred tokens or decisions, ``floor`` what nobody could do without."""

    name: str
    ours: Callable[[], object]
    floor: Callable[[], object]
    limit: float
    """Of their ratio. Halfway, in factors, between what it is and twice that."""


def ratio(ours: Callable[[], object], floor: Callable[[], object], turns: int = TURNS) -> float:
    least = [float("inf"), float("inf")]
    with _quiet():
        for turn in range(turns):
            for side in (0, 1) if turn % 2 else (1, 0):
                work = (ours, floor)[side]
                began = time.thread_time_ns()
                work()
                least[side] = min(least[side], time.thread_time_ns() - began)
    return least[0] / least[1]


def check(path: HotPath, measure: Callable[[HotPath], float] | None = None) -> float:
    """The ratio, within the limit. AssertionError: it was above in every try."""
    measure = measure or (lambda one: ratio(one.ours, one.floor))
    seen: list[float] = []
    for _ in range(TRIES):
        seen.append(measure(path))
        if seen[-1] <= path.limit:
            return seen[-1]
    tries = ", ".join(f"{one:.2f}" for one in seen)
    raise AssertionError(f"{path.name}: {tries} times its floor, and at most {path.limit:g} times is allowed")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the garbage collector, which would run in whichever turn it likes."""
    gc.collect()
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
