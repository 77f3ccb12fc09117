"""Time that passes at once: a loop whose clock jumps to whatever is due next, and what may be waited for in it."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any
from unittest import mock

_LOOK_EVERY = 0.05


class _Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1e-7  # no two instants are the same
        return self.now


class _Selector(selectors.SelectSelector):
    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None or super().select(0), "nothing will ever happen again: somebody waits for nothing"
        self._clock.now += max(0.0, timeout or 0.0)
        return super().select(0)


def run_virtual(main: Coroutine[Any, Any, None]) -> None:
    """Run ``main`` in a loop in which waiting takes no time. What any task or callback raises fails the test."""
    clock, complaints = _Clock(), []

    def make_loop() -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop(_Selector(clock))
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        return loop

    with mock.patch.object(time, "monotonic", clock), asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(main)
    assert not complaints, complaints


async def until(condition: Callable[[], Any], what: str, limit: float = 120.0) -> None:
    """``limit``: virtual seconds."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit:g} s: {what}"
        await asyncio.sleep(_LOOK_EVERY)


class VirtualRunner:
    """The same for tests that act step by step: between two of them no time passes. ``close`` it."""

    def __init__(self) -> None:
        self.clock = _Clock()
        self._complaints: list[Any] = []
        self._runner = asyncio.Runner(loop_factory=self._make_loop)

    def _make_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop(_Selector(self.clock))
        loop.set_exception_handler(lambda _, context: self._complaints.append(context))
        return loop

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        with mock.patch.object(time, "monotonic", self.clock), mock.patch.object(time, "monotonic_ns", self._in_ns):
            result = self._runner.run(main)
        assert not self._complaints, self._complaints
        return result

    def _in_ns(self) -> int:
        return int(self.clock() * 1e9)

    def close(self) -> None:
        self._runner.close()
