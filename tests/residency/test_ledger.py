"""The ledger: holds against samples. Times are a virtual clock's."""

from __future__ import annotations

import pytest

from slimproc.residency.ledger import Ledger
from slimproc.residency.views import HOST, Claim, DeviceSample, Sample
from tests.residency.world import GPU, claim, sample

GIB = 1 << 30


@pytest.fixture
def ledger() -> Ledger:
    """No margin; a sample of an empty GPU of 100 bytes, taken at 10."""
    ledger = Ledger(margin=0, max_sample_age=5.0)
    ledger.observe(sample(10.0))
    return ledger


def available(ledger, device=GPU, now=10.0):
    return ledger.view(device, now).available


# --- holds against samples --------------------------------------------------------------------------------------------


def test_a_hold_counts_before_anything_is_started(ledger):
    ledger.hold("a", GPU, claim(30, load_peak=40), 10.0)
    assert (available(ledger), ledger.held("a"), ledger.view(GPU, 10.0).held) == (60, 40, 40)


def test_available_stays_the_same_from_the_first_byte_of_a_load_to_the_last(ledger):
    ledger.hold("a", GPU, claim(40), 10.0)
    ledger.attach("a", 7)
    for at, taken in enumerate((0, 15, 40)):
        ledger.observe(sample(11.0 + at, free=100 - taken, attributed={7: taken}))
        assert available(ledger) == 60


def test_what_other_processes_take_is_gone_and_is_told_apart(ledger):
    ledger.hold("a", GPU, claim(40), 10.0)
    ledger.attach("a", 7)
    ledger.observe(sample(11.0, free=45, attributed={7: 25, 99: 1}))
    assert available(ledger) == 30
    assert ledger.view(GPU, 11.0).external == 30


def test_bytes_beyond_the_hold_are_not_counted_twice_and_raise_it(ledger):
    ledger.hold("a", GPU, claim(40), 10.0)
    ledger.attach("a", 7)
    ledger.observe(sample(11.0, free=50, attributed={7: 50}))
    assert (available(ledger), ledger.held("a")) == (50, 50)


def test_where_bytes_cannot_be_attributed_the_whole_hold_is_taken_off(ledger):
    ledger.hold("a", GPU, claim(40), 10.0)
    ledger.attach("a", 7)
    ledger.observe(sample(11.0, free=70, attributed=None))
    assert (available(ledger), ledger.view(GPU, 11.0).external, ledger.attributed("a")) == (30, 0, 0)


def test_the_bytes_of_a_server_that_is_not_our_child_are_not_called_strangers(ledger):
    ledger.hold("a", GPU, claim(40), 10.0)
    ledger.attach("a", None)
    ledger.observe(sample(11.0, free=50, attributed={}))
    assert (available(ledger), ledger.view(GPU, 11.0).external) == (10, 10)


def test_there_is_no_second_hold_of_one_owner(ledger):
    ledger.hold("a", GPU, claim(40), 10.0)
    with pytest.raises(AssertionError):
        ledger.hold("a", GPU, claim(40), 10.0)


def test_margins_are_a_gibibyte_on_gpus_and_five_percent_of_the_host():
    ledger = Ledger(margin=None, max_sample_age=5.0)
    devices = {
        HOST: DeviceSample("host", "host", 40 * GIB, 40 * GIB),
        GPU: DeviceSample("gpu", "gpu", 24 * GIB, 24 * GIB),
    }
    ledger.observe(Sample(1.0, devices))
    views = ledger.views(1.0)
    assert (views[HOST].margin, views[HOST].available) == (2 * GIB, 38 * GIB)
    assert (views[GPU].margin, views[GPU].available) == (GIB, 23 * GIB)
    ledger = Ledger(margin=3 * GIB, max_sample_age=5.0)
    ledger.observe(Sample(1.0, devices))
    assert {view.margin for view in ledger.views(1.0).values()} == {3 * GIB}


def test_an_older_sample_does_not_replace_a_newer_one(ledger):
    assert ledger.observe(sample(12.0, free=50))
    assert not ledger.observe(sample(11.0, free=90))
    assert ledger.view(GPU, 12.0).free == 50


def test_a_sample_is_fresh_for_its_time_and_a_device_that_no_sample_has_is_not_there(ledger):
    assert ledger.view(GPU, 15.0).fresh
    assert not ledger.view(GPU, 15.1).fresh
    assert ledger.view("GPU-9", 10.0) is None
    ledger.observe(Sample(11.0, {}))
    assert ledger.views(11.0) == {}


def test_a_fault_of_the_device_is_handed_on(ledger):
    ledger.observe(sample(11.0, fault="lost"))
    assert ledger.view(GPU, 11.0).fault == "lost"


# --- after the load ---------------------------------------------------------------------------------------------------


def test_after_the_load_the_hold_of_a_measured_model_is_what_it_needs_to_run_and_never_less_than_was_seen(ledger):
    ledger.hold("a", GPU, claim(30, load_peak=40), 10.0)
    ledger.attach("a", 7)
    ledger.resident("a", 11.0)
    assert ledger.held("a") == 30
    ledger.observe(sample(12.0, free=65, attributed={7: 35}))
    assert ledger.held("a") == 35
    ledger.observe(sample(13.0, free=75, attributed={7: 25}))
    assert ledger.held("a") == 35


def test_after_the_load_an_estimate_becomes_what_a_later_sample_shows_and_five_percent_and_grows(ledger):
    ledger.hold("a", GPU, claim(60, source="estimated"), 10.0)
    ledger.attach("a", 7)
    ledger.observe(sample(11.0, free=80, attributed={7: 20}))
    ledger.resident("a", 11.5)
    assert ledger.held("a") == 60, "the sample is older than the end of the load"
    ledger.observe(sample(11.4, free=60, attributed={7: 20}))
    assert ledger.held("a") == 60
    ledger.observe(sample(12.0, free=60, attributed={7: 40}))
    assert ledger.held("a") == 42
    ledger.observe(sample(13.0, free=40, attributed={7: 59}))
    assert ledger.held("a") == 60, "headroom alone takes no more than the hold that was let in"
    ledger.observe(sample(13.5, free=20, attributed={7: 80}))
    assert ledger.held("a") == 84
    ledger.observe(sample(14.0, free=90, attributed={7: 10}))
    assert ledger.held("a") == 84


@pytest.mark.parametrize("attributed", [None, {}])
def test_an_estimate_of_which_nothing_is_seen_stays(ledger, attributed):
    ledger.hold("a", GPU, claim(60, source="estimated"), 10.0)
    ledger.attach("a", 7)
    ledger.resident("a", 11.0)
    ledger.observe(sample(12.0, free=60, attributed=attributed))
    assert (ledger.held("a"), ledger.seen("a")) == (60, None)


def test_what_was_seen_can_be_kept_for_the_next_load(ledger):
    ledger.hold("a", GPU, claim(60, source="estimated", file="f", file_bytes=5), 10.0)
    ledger.attach("a", 7)
    ledger.observe(sample(11.0, free=40, attributed={7: 60}))
    assert ledger.seen("a") is None
    ledger.resident("a", 11.5)
    ledger.observe(sample(12.0, free=60, attributed={7: 40}))
    assert ledger.seen("a") == Claim(63, 42, 0, "f", 5, "measured")


# --- the end ----------------------------------------------------------------------------------------------------------


def ended(ledger, *, free=60, attributed=None, **changes):
    """A unit of 40 bytes that was resident, and ended at 12."""
    ledger.hold("a", GPU, claim(40, **changes), 10.0)
    ledger.attach("a", 7)
    ledger.resident("a", 10.5)
    ledger.observe(sample(11.0, free=free, attributed={7: 40} if attributed is None else attributed))
    ledger.end("a", 12.0)


def test_a_hold_outlives_its_end_until_a_later_sample(ledger):
    ended(ledger, free=100, attributed={})
    assert (available(ledger), ledger.view(GPU, 12.0).fresh) == (60, False)
    ledger.observe(sample(11.9))
    assert available(ledger) == 60
    ledger.observe(sample(12.1))
    assert (available(ledger), ledger.view(GPU, 12.1).fresh, ledger.holds()) == (100, True, [])


def test_an_end_without_a_hold_changes_nothing(ledger):
    ledger.end("nobody", 12.0)
    assert ledger.view(GPU, 12.0).fresh


def test_a_device_that_gives_memory_back_late_recovers_until_it_has(ledger):
    ended(ledger)
    for at in (12.5, 14.9):
        ledger.observe(sample(at, free=60, attributed={}))
        view = ledger.view(GPU, at)
        assert (view.fresh, view.recovering, view.available, view.external) == (True, True, 60, 0)
    ledger.observe(sample(15.0, free=100, attributed={}))
    assert not ledger.view(GPU, 15.0).recovering


def test_recovery_has_a_limit_and_then_the_bytes_are_somebody_elses(ledger):
    ended(ledger)
    ledger.observe(sample(17.0, free=60, attributed={}))
    view = ledger.view(GPU, 17.0)
    assert (view.recovering, view.external) == (False, 40)


def test_bytes_that_another_of_ours_takes_meanwhile_do_not_pass_for_lingering_ones(ledger):
    ledger.hold("b", GPU, claim(50), 10.0)
    ledger.attach("b", 8)
    ended(ledger)
    ledger.observe(sample(12.5, free=50, attributed={8: 50}))
    assert not ledger.view(GPU, 12.5).recovering


def test_the_end_is_noticed_even_when_a_sample_saw_the_process_gone_before(ledger):
    ledger.hold("a", GPU, claim(40), 10.0)
    ledger.attach("a", 7)
    ledger.observe(sample(11.0, free=60, attributed={7: 40}))
    ledger.observe(sample(11.5, free=60, attributed={}))
    ledger.end("a", 12.0)
    ledger.observe(sample(12.5, free=60, attributed={}))
    assert ledger.view(GPU, 12.5).recovering
    ledger.observe(sample(12.6, free=100, attributed={}))
    assert not ledger.view(GPU, 12.6).recovering


def test_what_a_server_keeps_after_its_unload_stays_held_until_it_loads_again(ledger):
    ended(ledger, residual=10)
    ledger.observe(sample(13.0, free=90, attributed={}))
    assert (ledger.held("a"), available(ledger), [each.state for each in ledger.holds()]) == (10, 80, ["residue"])
    ledger.hold("a", GPU, claim(40, residual=10), 14.0)
    assert (ledger.held("a"), available(ledger)) == (40, 50)


def test_a_new_hold_stands_beside_one_that_is_not_released_yet(ledger):
    ended(ledger)
    ledger.hold("a", GPU, claim(40), 12.0)
    assert available(ledger) == 20
    ledger.observe(sample(12.5, free=100, attributed={}))
    assert available(ledger) == 60


def test_a_hold_that_ended_while_loading_is_released_with_its_load_peak(ledger):
    ledger.hold("a", GPU, claim(30, load_peak=70), 10.0)
    ledger.end("a", 11.0)
    assert available(ledger) == 30


# --- crashes ----------------------------------------------------------------------------------------------------------


def test_a_crash_keeps_the_hold_and_the_restart_waits_for_a_sample_that_shows_room(ledger):
    ledger.hold("a", GPU, claim(50, load_peak=60), 10.0)
    ledger.attach("a", 7)
    ledger.resident("a", 10.5)
    ledger.observe(sample(11.0, free=50, attributed={7: 50}))
    ledger.lost("a", 12.0)
    assert (ledger.held("a"), ledger.reload("a", 12.0)) == (50, False)
    ledger.observe(sample(12.5, free=55, attributed={}))
    assert not ledger.reload("a", 12.5), "its bytes linger"
    ledger.observe(sample(13.0, free=100, attributed={}))
    assert ledger.reload("a", 13.0)
    assert ledger.held("a") == 60


# --- files and pools --------------------------------------------------------------------------------------------------


def host(taken, *, free=100, attributed=None, mapped=None, **others):
    devices = {HOST: DeviceSample("host", "host", 100, free, attributed or {}, mapped or {}), **others}
    return Sample(taken, devices)


def test_a_file_that_several_map_is_taken_off_once_and_in_full_as_long_as_one_holds_it():
    ledger = Ledger(margin=0, max_sample_age=5.0)
    ledger.observe(host(1.0))
    for owner, leader in (("a", 7), ("b", 8)):
        ledger.hold(owner, HOST, claim(10, file="weights", file_bytes=30), 1.0)
        ledger.attach(owner, leader)
    # Mapped pages still count as free, so that they are taken off although they are there.
    ledger.observe(host(2.0, free=80, attributed={7: 10, 8: 10}, mapped={7: 30, 8: 30}))
    assert (available(ledger, HOST), ledger.view(HOST, 2.0).held) == (50, 50)
    ledger.end("a", 2.5)
    ledger.observe(host(3.0, free=90, attributed={8: 10}, mapped={8: 30}))
    assert available(ledger, HOST) == 60
    ledger.end("b", 3.5)
    ledger.observe(host(4.0))
    assert available(ledger, HOST) == 100


def test_files_that_a_unit_maps_without_naming_them_belong_to_what_it_needs():
    ledger = Ledger(margin=0, max_sample_age=5.0)
    ledger.observe(host(1.0))
    ledger.hold("a", HOST, claim(80, source="estimated"), 1.0)
    ledger.attach("a", 7)
    ledger.resident("a", 1.5)
    ledger.observe(host(2.0, free=90, attributed={7: 10}, mapped={7: 30}))
    assert (ledger.held("a"), available(ledger, HOST)) == (42, 58)


def test_holds_on_the_host_and_on_a_unified_device_are_taken_off_both():
    ledger = Ledger(margin=0, max_sample_age=5.0)
    unified = DeviceSample("unified", "GB10", 100, 90)
    apart = DeviceSample("gpu", "gpu", 100, 100)
    ledger.observe(host(1.0, **{GPU: unified, "GPU-2": apart}))
    ledger.hold("a", HOST, claim(20), 1.0)
    ledger.hold("b", GPU, claim(30), 1.0)
    assert (available(ledger, HOST), available(ledger, GPU), available(ledger, "GPU-2")) == (50, 40, 100)
    ledger.end("a", 2.0)
    assert (ledger.view(GPU, 2.0).fresh, ledger.view("GPU-2", 2.0).fresh) == (False, True)


def test_statistics_and_repr_tell_the_bytes(ledger):
    ledger.hold("a", GPU, claim(40), 10.0)
    assert ledger.statistics(10.0) == {
        GPU: {"total": 100, "free": 100, "held": 40, "available": 60, "external": 0},
    }
    assert repr(ledger) == f"<Ledger a loading 40 on {GPU}>"
    assert [(each.owner, each.bytes, each.state) for each in ledger.holds()] == [("a", 40, "loading")]


def test_what_one_took_that_was_ended_for_its_memory_is_neither_held_nor_learnt(ledger):
    """It took all that there was; to hold as much again would keep it from ever starting."""
    ledger.hold("a", GPU, claim(20, source="estimated"), 10.0)
    ledger.attach("a", 7)
    ledger.resident("a", 11.0)
    ledger.observe(sample(12.0, free=10, attributed={7: 90}))
    assert ledger.held("a") >= 90
    ledger.lost("a", 13.0, took_all=True)
    assert ledger.seen("a") is None
    assert ledger.held("a") == 20
    ledger.observe(sample(14.0, free=100))
    assert ledger.reload("a", 14.5)
