"""Planning around servers that are not ours: what nobody knows yet, what nobody can know, and what has failed."""

from slimproc.residency.plan import plan
from slimproc.residency.views import Load, Phase, Refuse
from slimproc.residency.wishes import Wishes
from tests.residency.test_wishes import settle
from tests.residency.world import GPU, GPU_1, device, unit, world


def server(name="r", **changes):
    """One that has no hold, and of which nobody knows what it has."""
    return unit(name, 10, Phase.UNKNOWN, **changes)


def decided(units, demands, devices=None):
    found = plan(world(units, demands, devices))
    return list(found.actions), found.explanations


def test_who_is_kept_off_by_a_server_that_has_not_been_asked_yet_waits_and_by_one_that_was_is_refused():
    actions, told = decided([unit("a"), server(asked=False)], ["a"])
    assert (actions, told["a"].verdict) == ([], "wait")
    assert "r to be asked" in told["a"].reason

    actions, told = decided([unit("a"), server()], ["a"])
    assert [type(each) for each in actions] == [Refuse]
    assert "nobody knows what r has" in told["a"].reason


def test_who_fits_on_another_device_does_not_wait_for_a_servers_first_answer():
    units = [unit("a", devices=(GPU, GPU_1)), server(asked=False)]
    assert decided(units, ["a"], [device(GPU), device(GPU_1)])[0] == [Load("a", GPU_1, 10)]


def test_who_does_not_fit_elsewhere_waits_for_the_answer_of_the_server_in_its_way():
    units = [unit("a", 50, devices=(GPU, GPU_1)), server(asked=False)]
    assert decided(units, ["a"], [device(GPU), device(GPU_1, total=20)])[1]["a"].verdict == "wait"


def test_an_answer_that_would_change_nothing_is_not_waited_for():
    for units, size in (
        ([server(asked=False), server("s")], 50),
        ([server("s"), server(asked=False)], 50),
        ([server(asked=False)], 101),
    ):
        actions, _ = decided([unit("a", size), *units], ["a"])
        assert [type(each) for each in actions] == [Refuse], (size, units)


def test_a_server_that_has_not_been_asked_is_itself_loaded_when_somebody_wants_it():
    assert decided([server(asked=False)], ["r"])[0] == [Load("r", GPU, 10)]


def test_one_that_has_just_failed_is_not_loaded_again_though_it_keeps_its_hold():
    failed = server(device=GPU, hold=10, failed=True, note="no weights")
    actions, told = decided([failed], ["r"])
    assert actions == []
    assert told["r"].verdict == "refuse"
    assert "no weights" in told["r"].reason
    assert decided([server(device=GPU, hold=10)], ["r"])[0] == [Load("r", GPU, 10)]


def test_a_wish_of_the_start_lasts_until_every_server_was_asked():
    wishes = Wishes()
    wishes.preload(["a"])

    settle(wishes, [unit("a"), server(asked=False)])
    assert "a" in wishes
    settle(wishes, [unit("a"), server()])
    assert "a" not in wishes
