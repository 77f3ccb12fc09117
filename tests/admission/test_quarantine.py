"""What has killed two engines is refused; what was beside it is not."""

from __future__ import annotations

import pytest

from slimproc.admission.quarantine import MOST_DIGESTS, REFUSED_FOR, Quarantine
from slimproc.errors import EngineCrashed, EngineCrashedTwice, Quarantined
from slimproc.replicas.states import ReplicaState
from tests.fakes import FakeReplica, ManualClock, looped, request


def crash(replica: FakeReplica, death: int | None) -> None:
    """The engine dies with all its sequences inside the fatal call (None: between two)."""
    engine, replica.engine = replica.engine, None
    assert engine is not None
    engine.dead = True
    for rid in list(engine.streams):
        engine.fail(rid, EngineCrashed("it died", inside_of=death))
    replica.become(ReplicaState.BACKOFF, "it died")


def test_two_deaths_make_work_poison_for_ten_minutes_whoever_asks():
    clock = ManualClock()
    quarantine = Quarantine(clock)
    assert not quarantine.note(request(), 1)
    assert not quarantine.note(request(), 1), "two copies in one engine are one death"
    assert not quarantine.refuses(request())
    assert quarantine.note(request(seconds=5), 2)
    assert quarantine.refuses(request())
    assert not quarantine.refuses(request(prompts=["other"]))
    assert not quarantine.refuses(request(max_tokens=3))
    clock.pass_(REFUSED_FOR)
    assert not quarantine.refuses(request())
    assert len(quarantine) == 0


def test_memory_is_bounded_and_an_operator_clears_one_model():
    quarantine = Quarantine()
    for number in range(MOST_DIGESTS + 10):
        quarantine.note(request(prompts=[str(number)]), number)
    assert len(quarantine) == MOST_DIGESTS
    quarantine.note(request(model="other"), 1)
    quarantine.clear("m")
    assert len(quarantine) == 1


@looped
async def test_the_third_try_is_refused_at_once_until_an_operator_clears_it(open_desk):
    desk = open_desk()
    desk.replica.become_ready()
    generation = desk.submit()
    crash(desk.replica, 1)
    desk.replica.become_ready()
    crash(desk.replica, 2)
    with pytest.raises(EngineCrashedTwice):
        await generation.wait_finished()
    generation.close()
    engine = desk.replica.become_ready()
    with pytest.raises(Quarantined):
        desk.submit()
    assert not engine.submits
    assert desk.outcomes() == {"engine_crashed": 1, "poison": 1}
    desk.controller.clear_quarantine("m")
    desk.submit().close()


@looped
async def test_copies_in_two_engines_and_in_the_queue_cost_no_third(open_desk):
    replicas = [FakeReplica(index=index) for index in range(3)]
    desk = open_desk(*replicas)
    engines = [replica.become_ready() for replica in replicas]
    copies = [desk.submit() for _ in range(4)]
    crash(replicas[0], 1)
    crash(replicas[1], 2)
    assert {copy.outcome for copy in copies} == {"engine_crashed"}
    assert engines[2].cancels == [1]


@looped
async def test_a_suspect_runs_alone_and_its_neighbour_is_not_blamed_for_it(open_desk):
    desk = open_desk(FakeReplica(slots=2))
    desk.replica.become_ready()
    killer, neighbour = desk.submit(prompts=["killer"]), desk.submit(prompts=["neighbour"])
    crash(desk.replica, 1)
    engine = desk.replica.become_ready()
    assert [submit.prompt for submit in engine.submits.values()] == ["killer"]
    crash(desk.replica, 2)
    assert killer.outcome == "engine_crashed"
    engine = desk.replica.become_ready()
    assert [submit.prompt for submit in engine.submits.values()] == ["neighbour"]
    other = desk.submit(prompts=["other"])
    assert not other.started
    engine.say(1, "text")
    assert other.started, "the suspect has given text: it may have company"
    engine.finish(1)
    assert neighbour.outcome == "ok"
    other.close()


@looped
async def test_deaths_outside_a_native_call_make_nothing_poison(open_desk):
    desk = open_desk()
    for _ in range(3):
        desk.replica.become_ready()
        generation = desk.submit()
        crash(desk.replica, None)
        desk.replica.become_ready()
        crash(desk.replica, None)
        with pytest.raises(EngineCrashed) as caught:
            await generation.wait_finished()
        assert caught.value.retryable
        generation.close()


@looped
async def test_a_joined_answer_is_begun_anew_without_what_was_made_before(open_desk):
    desk = open_desk()
    engine = desk.replica.become_ready()
    generation = desk.submit()
    generation.streams[0].joined = True
    engine.say(1, "lost")
    crash(desk.replica, None)
    assert not generation.times.first_text
    desk.replica.become_ready().finish(1)
    assert generation.outcome == "ok"
    assert generation.streams[0].text == "end"
    assert generation.streams[0].completion_tokens == 1
