"""Wishes of the start and of operators end when they have come true, or cannot."""

from slimproc.residency.plan import plan
from slimproc.residency.views import Demand, Phase
from slimproc.residency.wishes import Wishes
from tests.residency.world import device, resident, unit, world


def settle(wishes, units, devices=None):
    seen = world(units, wishes.beside([]), devices)
    wishes.settle(plan(seen), seen)


def test_a_requests_demand_takes_the_place_of_a_wish_for_the_same_model():
    wishes = Wishes()
    wishes.preload(["a", "b"])
    asked = Demand("b", since=7.0)

    assert [(each.model, each.preload) for each in wishes.beside([asked])] == [("b", False), ("a", True)]


def test_a_wish_of_the_start_lasts_through_the_load_and_ends_with_it():
    wishes = Wishes()
    wishes.preload(["a"])

    settle(wishes, [unit("a")])
    assert "a" in wishes
    settle(wishes, [unit("a", phase=Phase.LOADING)])
    assert "a" in wishes
    settle(wishes, [resident("a")])
    assert "a" not in wishes


def test_a_wish_of_the_start_ends_when_there_is_no_room_but_not_while_nobody_knows(caplog):
    wishes = Wishes()
    wishes.preload(["a"])

    settle(wishes, [unit("a", 60)], [device(available=10, fresh=False)])
    assert "a" in wishes
    settle(wishes, [unit("a", 60)], [device(available=10)])
    assert "a" not in wishes
    assert "a model is not loaded at the start" in caplog.text


def test_a_wish_of_the_start_and_of_an_operator_end_when_the_model_has_failed():
    wishes = Wishes()
    wishes.preload(["a"])
    wishes.load("b", 1.0)

    settle(wishes, [unit("a", phase=Phase.FAILED), unit("b", phase=Phase.FAILED, note="it is broken")])

    assert "a" not in wishes
    assert "b" not in wishes


def test_an_operators_wish_waits_for_room_and_can_be_taken_back():
    wishes = Wishes()
    wishes.load("b", 1.0)

    settle(wishes, [resident("a", 80, busy=1), unit("b", 60)], [device(available=20)])
    assert "b" in wishes
    wishes.drop("b")
    wishes.drop("b")
    assert wishes.beside([]) == []
