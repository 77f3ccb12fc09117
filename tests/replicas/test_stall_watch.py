"""When an engine counts as stalled, as a machine of plain values: time moves by hand."""

from __future__ import annotations

import pytest

from slimproc.replicas.stall import StallWatch


class Loop:
    """Calls back when its time is set past theirs; how late, the test says."""

    def __init__(self) -> None:
        self.now = 100.0
        self.due: list[tuple[float, object]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, seconds, callback):
        entry = (self.now + seconds, callback)
        self.due.append(entry)
        return type("Handle", (), {"cancel": lambda _: self.due.remove(entry) if entry in self.due else None})()

    def run_until(self, end: float) -> None:
        while self.due and self.due[0][0] <= end:
            at, callback = self.due.pop(0)
            self.now = at
            callback()
        self.now = end

    def freeze(self, seconds: float) -> None:
        """Nothing of the machine runs; then what is overdue does."""
        self.now += seconds
        for _, callback in [self.due.pop(0) for _ in range(len(self.due))]:
            callback()


@pytest.fixture
def loop(monkeypatch):
    loop = Loop()
    monkeypatch.setattr("asyncio.get_running_loop", lambda: loop)
    return loop


class Engine:
    def __init__(self, **limits) -> None:
        self.steps, self.reasons = 0, []
        limits = {"stall_timeout": 10.0, "cancel_grace": 2.0} | limits
        self.watch = StallWatch(lambda: self.steps, self.reasons.append, **limits)


def test_no_step_for_the_whole_time_is_a_stall(loop):
    engine = Engine()
    engine.watch.started(1)
    loop.run_until(109.0)
    assert engine.reasons == []
    loop.run_until(111.0)
    assert "made no step in 10 s" in engine.reasons[0]
    loop.run_until(200.0)
    assert len(engine.reasons) == 1


def test_a_machine_that_slept_has_stopped_its_engines_too(loop):
    engine = Engine()
    engine.watch.started(1)
    loop.run_until(105.0)
    loop.freeze(3600.0)
    assert engine.reasons == []
    loop.run_until(loop.now + 4.0)
    assert engine.reasons == [], "five seconds before the sleep and four after it"
    loop.run_until(loop.now + 3.0)
    assert len(engine.reasons) == 1


def test_a_freeze_does_not_use_up_a_cancelled_sequences_grace(loop):
    engine = Engine()
    engine.watch.started(1)
    engine.watch.asked_to_stop(1)
    loop.freeze(60.0)
    assert engine.reasons == []
    loop.run_until(loop.now + 3.0)
    assert "did not stop a cancelled sequence" in engine.reasons[0]


def test_beside_a_living_sequence_one_that_does_not_stop_only_keeps_others_away(loop):
    engine = Engine()
    for rid in (1, 2):
        engine.watch.started(rid)
    engine.watch.asked_to_stop(1)
    for second in range(1, 6):
        engine.steps += 1
        loop.run_until(100.0 + second)
    assert (engine.watch.overdue, engine.reasons) == (True, [])
    engine.watch.ended(2)
    loop.run_until(107.0)
    assert "did not stop a cancelled sequence" in engine.reasons[0]


def test_one_that_stops_late_after_all_is_forgiven(loop):
    engine = Engine()
    for rid in (1, 2):
        engine.watch.started(rid)
    engine.watch.asked_to_stop(1)
    for second in range(1, 6):
        engine.steps += 1
        loop.run_until(100.0 + second)
    engine.watch.ended(1)
    assert not engine.watch.overdue


def test_where_loading_takes_longer_than_the_grace_a_cancelled_sequence_has_that_long(loop):
    engine = Engine(stall_timeout=100.0)
    engine.watch.reload_takes(8.0)
    engine.watch.started(1)
    engine.watch.asked_to_stop(1)
    loop.run_until(107.0)
    assert engine.reasons == []
    loop.run_until(109.0)
    assert "in 8 s" in engine.reasons[0]
