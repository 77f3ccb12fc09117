"""Planning, rule by rule: what is loaded, who goes, who waits and who is refused, as a function of the world."""

from __future__ import annotations

import dataclasses

import pytest

from slimproc.residency.plan import explain, plan
from slimproc.residency.room import Room
from slimproc.residency.views import HOST, Abandon, Demand, Evict, Expire, Load, Phase, Refuse
from tests.residency.world import GPU, GPU_1, claim, device, draining, resident, unit, world


def actions(*arguments, **options):
    return list(plan(world(*arguments, **options)).actions)


def told(*arguments, **options):
    """The explanations."""
    return plan(world(*arguments, **options)).explanations


def refusals(decided):
    return [(each.model, each.code) for each in decided if isinstance(each, Refuse)]


# --- loading ----------------------------------------------------------------------------------------------------------


def test_a_demanded_model_that_fits_is_loaded_with_a_hold_of_its_peak():
    asked = unit("a", claim=claim(30, load_peak=40))
    decided = plan(world([asked], ["a"]))
    assert decided.actions == [Load("a", GPU, 40)]
    told = decided.explanations["a"]
    assert (told.verdict, told.device, told.needed, told.available, told.total) == ("load", GPU, 40, 100, 100)


@pytest.mark.parametrize(
    ("phase", "verdict"), [(Phase.RESIDENT, "resident"), (Phase.LOADING, "loading"), (Phase.LEAVING, "wait")]
)
def test_a_model_that_is_there_or_on_its_way_is_not_loaded_again(phase, verdict):
    decided = plan(world([unit("a", 10, phase)], ["a"]))
    assert decided.actions == []
    assert decided.explanations["a"].verdict == verdict


def test_it_fits_to_the_last_byte_and_not_a_byte_more():
    assert actions([unit("a", 50)], ["a"], [device(available=50)]) == [Load("a", GPU, 50)]
    assert refusals(actions([unit("a", 51)], ["a"], [device(available=50)])) == [("a", "insufficient_memory")]


def test_two_demands_that_fit_together_are_loaded_together_and_a_third_that_does_not_waits():
    units = [unit("a", 50), unit("b", 40), unit("c", 30)]
    decided = plan(world(units, ["a", "b", "c"]))
    assert decided.actions == [Load("a", GPU, 50), Load("b", GPU, 40)]
    assert decided.explanations["c"].verdict == "wait"


def test_the_first_device_where_it_fits_is_taken():
    units = [unit("a", 50, devices=(GPU, GPU_1))]
    assert actions(units, ["a"], [device(GPU, available=40), device(GPU_1)]) == [Load("a", GPU_1, 50)]
    assert actions(units, ["a"], [device(GPU), device(GPU_1)]) == [Load("a", GPU, 50)]


def test_a_device_with_a_fault_is_not_used():
    units = [unit("a", 50, devices=(GPU, GPU_1))]
    assert actions(units, ["a"], [device(GPU, fault="lost"), device(GPU_1)]) == [Load("a", GPU_1, 50)]


def test_when_all_its_devices_are_faulty_or_gone_a_model_is_refused_as_not_ready():
    decided = actions([unit("a", 50, devices=(GPU, GPU_1))], ["a"], [device(GPU, fault="lost")])
    assert refusals(decided) == [("a", "not_ready")]
    assert "lost" in decided[0].explanation.reason


def test_without_a_fresh_sample_nothing_is_loaded_evicted_or_refused():
    units = [unit("a", 50), resident("b", 60)]
    for available in (100, 40, 0):
        decided = plan(world(units, ["a"], [device(available=available, fresh=False)]))
        assert decided.actions == []
        assert decided.explanations["a"].verdict == "wait"


def test_before_the_first_sample_everybody_waits():
    decided = plan(world([unit("a", 50)], ["a"], []))
    assert (decided.actions, decided.explanations["a"].verdict) == ([], "wait")
    decided = plan(world([unit("a", 50, devices=())], ["a"]))
    assert (decided.actions, decided.explanations["a"].verdict) == ([], "wait")


def test_all_replicas_of_a_demanded_model_are_loaded_as_far_as_they_fit():
    units = [unit(f"a{place}", 40, model="a") for place in range(3)]
    assert actions(units, ["a"]) == [Load("a0", GPU, 40), Load("a1", GPU, 40)]


def test_further_replicas_evict_nobody_and_come_after_the_first_of_every_demand():
    units = [unit("a0", 40, model="a"), unit("a1", 40, model="a"), unit("b", 50)]
    assert actions(units, ["a", "b"]) == [Load("a0", GPU, 40), Load("b", GPU, 50)]
    units = [resident("a0", 40, model="a"), unit("a1", 40, model="a"), resident("b", 50)]
    assert actions(units, ["a"], [device(available=10)]) == []


def test_a_unit_that_backs_off_does_not_count_when_another_can_be_loaded():
    units = [unit("a0", 40, Phase.LOADING, model="a", backing_off=True), unit("a1", 40, model="a")]
    assert actions(units, ["a"], [device(available=60)]) == [Load("a1", GPU, 40)]
    assert told(units[:1], ["a"])["a"].verdict == "loading"


def test_a_mapped_file_counts_once_however_many_map_it():
    shared = claim(10, file="weights", file_bytes=60)
    there = resident("a0", model="a", claim=shared, devices=(HOST,))
    more = unit("a1", model="a", claim=shared, devices=(HOST,))
    assert actions([there, more], ["a"], [device(HOST, kind="host", available=30)]) == [Load("a1", HOST, 10)]
    assert refusals(actions([more], ["a"], [device(HOST, kind="host", available=30)])) == [("a", "insufficient_memory")]
    decided = actions([more, unit("b", claim=shared, devices=(HOST,))], ["a", "b"], [device(HOST, available=80)])
    assert decided == [Load("a1", HOST, 10), Load("b", HOST, 10)]


def test_a_residue_is_part_of_what_its_owner_needs():
    remote = unit("a", claim=claim(50, residual=20), hold=20)
    assert actions([remote], ["a"], [device(available=30)]) == [Load("a", GPU, 50)]
    elsewhere = dataclasses.replace(remote, device=GPU_1, devices=(GPU, GPU_1))
    assert actions([elsewhere], ["a"], [device(available=49), device(GPU_1, available=30)]) == [Load("a", GPU_1, 50)]


# --- eviction ---------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first():
    units = [unit("new", 30), resident("a", 30, idle_since=20), resident("b", 30, idle_since=10)]
    assert actions(units, ["new"], [device(available=10)]) == [Evict("b", by="new")]


def test_as_many_go_as_are_needed_and_no_more():
    units = [unit("new", 60), *(resident(name, 20, idle_since=at) for at, name in enumerate("abcd"))]
    assert actions(units, ["new"], [device(available=20)]) == [Evict("a", by="new"), Evict("b", by="new")]


def test_a_small_one_stays_when_a_larger_one_that_must_go_is_enough():
    units = [unit("new", 50), resident("small", 5, idle_since=1), resident("large", 50, idle_since=2)]
    assert actions(units, ["new"], [device(available=0)]) == [Evict("large", by="new")]


def test_what_is_busy_counts_as_just_used():
    units = [unit("new", 30), resident("busy", 30, idle_since=1, busy=1), resident("idle", 30, idle_since=900)]
    assert actions(units, ["new"], [device(available=10)]) == [Evict("idle", by="new")]


def test_what_is_busy_drains_when_nothing_else_can_go():
    assert actions([unit("new", 30), resident("busy", 30, busy=2)], ["new"], [device(available=10)]) == [
        Evict("busy", by="new")
    ]


def test_what_is_pinned_never_goes():
    units = [unit("new", 30), resident("pinned", 80, pinned=True)]
    decided = actions(units, ["new"], [device(available=20)])
    assert refusals(decided) == [("new", "insufficient_memory")]
    assert "pinned: pinned" in decided[0].explanation.reason


def test_what_is_pinned_stays_when_somebody_else_can_go():
    units = [unit("new", 30), resident("pinned", 30, pinned=True, idle_since=1), resident("a", 30, idle_since=2)]
    assert actions(units, ["new"], [device(available=0)]) == [Evict("a", by="new")]


def test_what_is_loading_is_waited_for_and_never_cut_off():
    units = [unit("new", 60), unit("loading", 60, Phase.LOADING)]
    decided = plan(world(units, ["new"], [device(available=40)]))
    assert (decided.actions, decided.explanations["new"].verdict) == ([], "wait")


def test_what_backs_off_may_be_evicted_at_once_and_before_what_serves():
    units = [unit("new", 60), resident("old", 60), unit("off", 40, Phase.LOADING, backing_off=True, attributed=0)]
    assert actions(units, ["new"], [device(available=20)]) == [Evict("off", by="new")]


def test_min_resident_is_waited_for_and_wakes_planning_when_it_ends():
    units = [unit("new", 60), resident("a", 60, resident_since=995, min_resident=30)]
    decided = plan(world(units, ["new"], [device(available=40)], now=1000))
    assert (decided.actions, decided.explanations["new"].verdict, decided.wake_at) == ([], "wait", 1025)
    assert actions(units, ["new"], [device(available=40)], now=1025) == [Evict("a", by="new")]


def test_nobody_goes_yet_while_one_of_those_who_must_go_may_not():
    units = [unit("new", 90), resident("a", 50), resident("b", 50, resident_since=995, min_resident=30)]
    assert actions(units, ["new"], [device(available=0)], now=1000) == []


def test_a_model_with_an_older_waiter_is_not_evicted_for_a_younger_one():
    units = [unit("new", 60), resident("a", 60, busy=1)]
    assert actions(units, ["a", "new"], [device(available=40)]) == []
    assert actions(units, ["new", "a"], [device(available=40)]) == [Evict("a", by="new")]


def test_replicas_of_the_demanded_model_do_not_go_for_it():
    units = [unit("a0", 60, model="a"), unit("a1", 60, Phase.LOADING, model="a", backing_off=True)]
    decided = plan(world(units, ["a"], [device(available=40)]))
    assert not any(isinstance(each, Evict) for each in decided.actions)


def test_bytes_that_are_on_their_way_back_spare_others():
    units = [unit("new", 60), unit("leaving", 50, Phase.LEAVING), resident("a", 40)]
    decided = plan(world(units, ["new"], [device(available=10)]))
    assert (decided.actions, decided.explanations["new"].verdict) == ([], "wait")


def test_the_device_with_the_fewest_new_victims_is_chosen():
    both = (GPU, GPU_1)
    units = [unit("new", 60, devices=both), resident("a", 30), resident("b", 30), resident("c", 60, devices=(GPU_1,))]
    devices = [device(GPU, available=0), device(GPU_1, available=0)]
    assert actions(units, ["new"], devices) == [Evict("c", by="new")]


def test_a_drain_that_is_under_way_is_kept_rather_than_begun_elsewhere():
    both = (GPU, GPU_1)
    units = [unit("new", 60, devices=both), draining("a", 60, "new", busy=1), resident("b", 60, devices=(GPU_1,))]
    assert actions(units, ["new"], [device(GPU, available=0), device(GPU_1, available=0)]) == []


def test_nobody_else_goes_while_the_bytes_of_one_who_went_are_not_back_yet():
    units = [unit("new", 60), resident("a", 50)]
    for unsettled in ({"fresh": False}, {"recovering": True}):
        decided = plan(world(units, ["new"], [device(available=20, **unsettled)]))
        assert (decided.actions, decided.explanations["new"].verdict) == ([], "wait")


def test_a_drain_goes_on_while_a_sample_is_awaited():
    units = [unit("new", 80), draining("a", 40, "new", busy=1)]
    assert actions(units, ["new"], [device(available=10, fresh=False)]) == []


def test_a_server_whose_bytes_nobody_can_attribute_goes_although_its_hold_is_less_than_is_missing():
    # Its 80 bytes are missing in free, and its hold is taken off as well: there is less than nothing.
    units = [unit("new", 80, attributed=0), resident("remote", 80, attributed=0)]
    devices = [device(free=20, available=-60)]
    assert actions(units, ["new"], devices) == [Evict("remote", by="new")]


# --- abandoning -------------------------------------------------------------------------------------------------------


def test_a_drain_is_abandoned_when_nobody_waits_for_its_bytes_any_more():
    assert actions([unit("new", 60), draining("a", 60, "new")], [], [device(available=40)]) == [Abandon("a")]


def test_a_drain_is_abandoned_when_its_bytes_have_come_from_elsewhere():
    units = [unit("new", 60), draining("a", 40, "new", busy=1)]
    assert actions(units, ["new"], [device(available=60)]) == [Load("new", GPU, 60), Abandon("a")]


def test_a_drain_is_abandoned_when_its_own_model_was_asked_for_before():
    units = [unit("new", 60), draining("a", 60, "new", busy=1)]
    decided = plan(world(units, ["a", "new"], [device(available=40)]))
    assert decided.actions == [Abandon("a")]
    assert decided.explanations["a"].verdict == "resident"
    assert actions(units, ["new", "a"], [device(available=40)]) == []


def test_what_drains_for_somebody_who_left_goes_on_draining_for_the_next_one_who_needs_it():
    assert actions([unit("b", 60), draining("a", 60, "gone")], ["b"], [device(available=40)]) == []


def test_a_ttl_that_has_ended_is_forgotten_when_the_model_is_wanted_before_it_has_gone():
    assert actions([draining("a", expired=True)], ["a"]) == [Abandon("a")]
    assert actions([draining("a", expired=True)], []) == []


def test_what_an_operator_takes_out_goes_on_draining_whoever_wants_it():
    decided = plan(world([draining("a")], ["a"]))
    assert (decided.actions, decided.explanations["a"].verdict) == ([], "wait")


# --- order ------------------------------------------------------------------------------------------------------------


def test_a_younger_demand_does_not_take_the_bytes_that_an_older_one_waits_for():
    units = [unit("large", 90), draining("a", 60, "large", busy=1), unit("small", 20)]
    decided = plan(world(units, ["large", "small"], [device(available=40)]))
    assert decided.actions == []
    assert decided.explanations["small"].verdict == "wait"


def test_nobody_younger_is_loaded_on_a_device_that_an_older_demand_waits_for_even_into_what_seems_left_over():
    units = [unit("large", 80), draining("a", 60, "large", busy=1), unit("small", 20)]
    decided = plan(world(units, ["large", "small"], [device(available=40)]))
    assert decided.actions == []
    assert "after large" in decided.explanations["small"].reason


def test_nobody_is_evicted_for_a_younger_demand_where_an_older_one_waits():
    units = [unit("large", 60), resident("a", 60, idle_since=1), resident("b", 40, idle_since=2), unit("small", 40)]
    assert actions(units, ["large", "small"], [device(available=0)]) == [Evict("a", by="large")]


def test_a_younger_demand_is_served_at_once_where_its_model_is_in_memory():
    units = [unit("large", 60), draining("a", 60, "large", busy=1), resident("b", 40)]
    decided = plan(world(units, ["large", "b"], [device(available=0)]))
    assert decided.explanations["b"].verdict == "resident"


def test_a_younger_demand_that_never_fits_is_refused_though_an_older_one_waits():
    units = [unit("large", 80), draining("a", 60, "large", busy=1), unit("huge", 5000)]
    decided = plan(world(units, ["large", "huge"], [device(available=40)]))
    assert decided.explanations["huge"].verdict == "refuse"


def test_an_older_demand_that_waits_keeps_a_younger_one_from_its_own_device_only():
    units = [unit("large", 90), unit("busy", 60, Phase.LOADING), unit("small", 20, devices=(GPU, GPU_1))]
    devices = [device(available=40), device(GPU_1)]
    assert actions(units, ["large", "small"], devices) == [Load("small", GPU_1, 20)]


def test_a_request_goes_before_what_is_loaded_at_the_start():
    demands = [Demand("a", 0.0, 0, preload=True), Demand("b", 500.0)]
    assert actions([unit("a", 60), unit("b", 60)], demands) == [Load("b", GPU, 60)]


def test_the_start_loads_what_fits_in_its_order_and_evicts_and_refuses_nobody():
    demands = [Demand(name, float(place), 0, preload=True) for place, name in enumerate("abcd")]
    units = [unit("a", 40), unit("b", 70), unit("c", 50), unit("d", 500), resident("old", 10)]
    decided = plan(world(units, demands, [device(available=90)]))
    assert decided.actions == [Load("a", GPU, 40), Load("c", GPU, 50)]
    assert [decided.explanations[name].verdict for name in "abcd"] == ["load", "wait", "load", "wait"]


def test_with_strict_order_only_the_oldest_demand_is_looked_at():
    units = [unit("large", 90), unit("busy", 60, Phase.LOADING), unit("small", 20, devices=(GPU_1,))]
    devices = [device(available=40), device(GPU_1)]
    decided = plan(world(units, ["large", "small"], devices, strict=True))
    assert decided.actions == []
    assert "after large" in decided.explanations["small"].reason


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_what_is_larger_than_the_device_is_refused_at_once_even_without_a_fresh_sample():
    decided = actions([unit("a", 96)], ["a"], [device(margin=5, fresh=False)])
    assert refusals(decided) == [("a", "insufficient_memory")]
    assert "at most 95" in decided[0].explanation.reason


def test_what_other_processes_have_leads_to_a_refusal_that_says_so_with_numbers():
    decided = actions([unit("a", 80)], ["a"], [device(available=30, external=70)])
    told = decided[0].explanation
    assert (told.verdict, told.needed, told.available, told.total) == ("refuse", 80, 30, 100)
    assert "other processes have at least 70 bytes" in told.reason
    assert "50 bytes would be missing" in told.reason


def test_what_loads_is_busy_or_young_may_go_later_and_so_leads_to_no_refusal():
    for other in (
        unit("b", 90, Phase.LOADING),
        resident("b", 90, busy=1, resident_since=1000, min_resident=60),
    ):
        assert actions([unit("a", 80), other], ["a"], [device(available=10)]) == []


def test_nobody_is_refused_while_the_device_recovers():
    assert actions([unit("a", 80)], ["a"], [device(available=30, recovering=True)]) == []


def test_with_several_devices_a_model_is_refused_only_when_none_could_have_it():
    asked = unit("a", 80, devices=(GPU, GPU_1))
    other = unit("b", 90, Phase.LOADING, devices=(GPU_1,))
    devices = [device(available=30), device(GPU_1, available=10)]
    assert actions([asked, other], ["a"], devices) == []
    pinned = dataclasses.replace(other, pinned=True)
    assert refusals(actions([asked, pinned], ["a"], devices)) == [("a", "insufficient_memory")]


def test_an_unknown_server_without_a_hold_blocks_loads_on_its_device_and_is_named():
    units = [unit("a", 10), unit("asr", 10, Phase.UNKNOWN, device=None, note="connection refused")]
    decided = actions(units, ["a"])
    assert refusals(decided) == [("a", "insufficient_memory")]
    assert "asr" in decided[0].explanation.reason
    assert actions([units[0], unit("asr", 10, Phase.UNKNOWN, devices=(GPU_1,))], ["a"]) == [Load("a", GPU, 10)]


def test_unknown_servers_may_be_loaded_themselves_or_nobody_could_ever_get_to_know_them():
    units = [unit(name, 60, Phase.UNKNOWN, device=None) for name in ("asr", "aligner")]
    assert actions(units, ["asr"]) == [Load("asr", GPU, 60)]


def test_an_unknown_server_with_a_hold_is_taken_at_its_word_and_stays():
    units = [unit("a", 50), unit("asr", 60, Phase.UNKNOWN, device=GPU, hold=60)]
    decided = actions(units, ["a"], [device(available=40)])
    assert refusals(decided) == [("a", "insufficient_memory")]
    assert "of unknown state: asr" in decided[0].explanation.reason
    assert actions(units, ["a"], [device(available=50)]) == [Load("a", GPU, 50)]


def test_a_failed_unload_blocks_the_next_load():
    stuck = unit("b", 10, Phase.LEAVING, note="its server answered 500")
    for asked in (unit("a", 10), unit("a", 90)):
        decided = actions([asked, stuck], ["a"], [device(available=90)])
        assert refusals(decided) == [("a", "lifecycle_pending")]
        assert "its server answered 500" in decided[0].explanation.reason
    assert refusals(actions([stuck], ["b"])) == [("b", "lifecycle_pending")]


def test_beside_a_process_that_nothing_can_end_others_are_loaded_and_its_bytes_do_not_count_as_coming_back():
    stuck = unit("b", 60, Phase.LEAVING, device=GPU, hold=60, killed=True, note="process 7 does not end")
    assert actions([unit("a", 40), stuck], ["a"], [device(available=40)]) == [Load("a", GPU, 40)]
    assert refusals(actions([unit("a", 50), stuck], ["a"], [device(available=40)])) == [("a", "insufficient_memory")]
    decided = actions([stuck], ["b"], [device(available=40)])
    assert refusals(decided) == [("b", "lifecycle_pending")]
    assert "process 7 does not end" in decided[0].explanation.reason


def test_a_failed_model_is_explained_and_left_to_admission():
    decided = plan(world([unit("a", 10, Phase.FAILED, note="no such file")], ["a"]))
    assert decided.actions == []
    assert (decided.explanations["a"].verdict, "no such file" in decided.explanations["a"].reason) == ("refuse", True)


# --- ttl --------------------------------------------------------------------------------------------------------------


def test_what_was_idle_for_its_ttl_expires_and_planning_wakes_for_it():
    idle = resident("a", ttl=60, idle_since=950)
    decided = plan(world([idle], now=1000))
    assert (decided.actions, decided.wake_at) == ([], 1010)
    assert actions([idle], now=1010) == [Expire("a")]


@pytest.mark.parametrize("spared", [{"busy": 1}, {"pinned": True}, {"ttl": None}, {"phase": Phase.DRAINING}])
def test_what_is_busy_or_pinned_does_not_expire(spared):
    assert actions([dataclasses.replace(resident("a", ttl=1, idle_since=0), **spared)]) == []


def test_what_is_demanded_does_not_expire():
    assert actions([resident("a", ttl=1, idle_since=0)], ["a"]) == []


# --- pools, explanations, cost ----------------------------------------------------------------------------------------


def test_the_host_and_a_unified_device_are_one_memory():
    units = [unit("a", 50, devices=(GPU,)), resident("b", 60, devices=(HOST,))]
    devices = [device(HOST, kind="host", available=40), device(GPU, kind="unified", available=40)]
    assert actions(units, ["a"], devices) == [Evict("b", by="a")]
    apart = [device(HOST, kind="host", available=40), device(GPU, available=50)]
    assert actions(units, ["a"], apart) == [Load("a", GPU, 50)]


def test_a_model_that_nobody_demands_is_explained_as_if_somebody_did():
    units = [unit("a", 60), resident("b", 60)]
    told = explain(world(units, [], [device(available=40)]), "a")
    assert (told.verdict, list(told.victims), told.needed, told.available) == ("evict", ["b"], 60, 40)
    assert explain(world(units, ["b"], [device(available=40)]), "a").verdict == "wait"
    assert explain(world(units), "b").verdict == "resident"
    assert explain(world(units), "nobody").verdict == "refuse"


def test_the_same_world_has_the_same_plan_in_whatever_order_it_is_told():
    units = [unit(name, 30) for name in "abcd"] + [resident(name, 20, idle_since=1) for name in "efg"]
    demands = [Demand(name, 1.0) for name in "abcd"]
    first = plan(world(units, demands, [device(available=40)]))
    assert plan(world(units, demands[::-1], [device(available=40)])) == first


def test_a_hundred_units_and_as_many_demands_are_planned_in_a_bounded_number_of_looks(monkeypatch):
    looks = 0
    short = Room.short

    def counting(self, *arguments, **options):
        nonlocal looks
        looks += 1
        return short(self, *arguments, **options)

    monkeypatch.setattr(Room, "short", counting)
    units = [unit(f"n{each}", 30, devices=(GPU, GPU_1)) for each in range(50)]
    units += [resident(f"r{each}", 1, idle_since=each, devices=(GPU, GPU_1)) for each in range(50)]
    plan(world(units, [f"n{each}" for each in range(50)], [device(available=0), device(GPU_1, available=0)]))
    assert looks < 50 * 2 * 100


def test_who_holds_all_that_it_needs_begins_again_within_that_however_much_others_have_taken():
    unknown = unit("a", 60, Phase.UNKNOWN, device=GPU, hold=60, attributed=0)

    assert plan(world([unknown], ["a"], [device(available=-20)])).actions == [Load("a", GPU, 60)]
