"""Who waits for a sample is told when none has come for so long, and nobody else is."""

from slimproc.residency.patience import SHORTEST, Patience
from slimproc.residency.plan import plan
from slimproc.residency.views import Demand
from tests.residency.world import GPU_1, device, resident, unit, world


def look(patience, now, *, since, fresh=False, units=None, devices=None):
    devices = [device(fresh=fresh)] if devices is None else devices
    seen = world(units or [unit("a")], [Demand("a", since)], devices, now=now)
    over, next_at = patience.look(plan(seen), seen)
    return [each.model for each in over], next_at


def test_the_limit_runs_from_when_both_the_request_and_the_silence_were_there():
    patience = Patience(5.0)

    assert look(patience, 10.0, since=8.0) == ([], 15.0)
    assert look(patience, 14.9, since=14.0) == ([], 19.0)
    assert look(patience, 15.0, since=8.0) == (["a"], None)


def test_a_fresh_sample_begins_it_anew():
    patience = Patience(5.0)
    look(patience, 10.0, since=8.0)
    assert look(patience, 12.0, since=8.0, fresh=True) == ([], None)
    assert look(patience, 15.0, since=8.0) == ([], 20.0)


def test_before_anything_was_ever_measured_it_runs_from_the_request():
    assert look(Patience(5.0), 12.0, since=8.0, devices=[]) == ([], 13.0)
    assert look(Patience(5.0), 13.0, since=8.0, devices=[]) == (["a"], None)


def test_however_old_a_sample_may_be_at_most_it_is_waited_for_until_one_can_be_there():
    """Samples come a second apart while nobody asks, and after some more when a probe has failed."""
    patience = Patience(0.2)
    assert look(patience, 10.0, since=10.0) == ([], 10.0 + SHORTEST)
    patience.set_limit(0.1)
    assert look(patience, 10.0 + SHORTEST, since=10.0) == (["a"], None)


def test_who_waits_for_something_else_or_has_another_device_is_left_alone():
    waits = [resident("b", 80, busy=1, min_resident=1e9, resident_since=0.0), unit("a", 60)]
    assert look(Patience(5.0), 100.0, since=0.0, units=waits, devices=[device(available=20)]) == ([], None)
    both = [device(fresh=False), device(GPU_1, available=0)]
    either = [unit("a", 60, devices=("GPU-0", GPU_1)), resident("b", 100, devices=(GPU_1,), busy=1)]
    assert look(Patience(5.0), 100.0, since=0.0, units=either, devices=both)[0] == []
