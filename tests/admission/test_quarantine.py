"""What has killed two engines is refused; what was beside it is not."""

from __future__ import annotations

import pytest

from slimproc.admission import suspects
from slimproc.admission.quarantine import MOST_DIGESTS, MOST_PARDONS, REFUSED_FOR, Quarantine
from slimproc.errors import EngineCrashed, EngineCrashedTwice, Quarantined
from slimproc.ipc.wire import Tokenize
from slimproc.replicas.states import ReplicaState
from tests.fakes import FakeReplica, ManualClock, eventually, looped, request


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
    assert not quarantine.note("m", request(), 1)
    assert not quarantine.note("m", request(), 1), "two copies in one engine are one death"
    assert not quarantine.refuses("m", request())
    assert quarantine.note("m", request(seconds=5), 2)
    assert quarantine.refuses("m", request())
    assert not quarantine.refuses("m", request(prompts=["other"]))
    assert not quarantine.refuses("m", request(max_tokens=3))
    clock.pass_(REFUSED_FOR)
    assert not quarantine.refuses("m", request())
    assert len(quarantine) == 0


def test_memory_is_bounded_and_an_operator_clears_one_model():
    quarantine = Quarantine()
    for number in range(MOST_DIGESTS + 10):
        quarantine.note("m", request(prompts=[str(number)]), number)
    assert len(quarantine) == MOST_DIGESTS
    quarantine.note("other", request(), 1)
    quarantine.clear("m")
    assert len(quarantine) == 1


def test_what_ends_well_is_pardoned_but_not_for_ever():
    quarantine = Quarantine()
    for death in range(MOST_PARDONS):
        quarantine.note("m", request(), death)
        assert quarantine.suspected_since("m", request()) is not None
        quarantine.pardon("m", request())
        assert quarantine.suspected_since("m", request()) is None
    quarantine.note("m", request(), 10)
    quarantine.pardon("m", request())
    assert quarantine.note("m", request(), 11)
    assert quarantine.refuses("m", request())


def test_a_question_is_known_by_what_it_asks():
    quarantine = Quarantine()
    assert not quarantine.note("m", Tokenize(5, "text", True, False), 1)
    assert quarantine.note("m", Tokenize(9, "text", True, False), 2)
    assert quarantine.refuses("m", Tokenize(1, "text", True, False))
    assert not quarantine.refuses("m", Tokenize(1, "text", True, True))


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
    desk.controller.suspects.clear("m")
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
async def test_copies_of_a_suspect_have_their_engine_together(open_desk):
    desk = open_desk(FakeReplica(slots=3))
    desk.replica.become_ready()
    first = desk.submit(prompts=["same"])
    crash(desk.replica, 1)
    engine = desk.replica.become_ready()
    second = desk.submit(prompts=["same"])
    assert not second.started, "the first is on trial"
    engine.say(1, "text")
    assert second.started
    engine.say(2, "text")
    for rid in (1, 2):
        engine.finish(rid)
    assert (first.outcome, second.outcome) == ("ok", "ok")
    again, other = desk.submit(prompts=["other"]), desk.submit(prompts=["same"])
    assert again.started
    assert other.started, "it has ended well, and is no suspect any more"
    again.close()
    other.close()


@looped
async def test_a_suspect_waits_for_an_empty_engine_only_so_long_and_then_is_blamed_alone(open_desk, monkeypatch):
    monkeypatch.setattr(suspects, "PATIENCE", 0.05)
    desk = open_desk(FakeReplica(slots=3))
    desk.replica.become_ready()
    innocent, killer = desk.submit(prompts=["innocent"]), desk.submit(prompts=["killer"])
    for generation in (innocent, killer):
        generation.streams[0].joined = True
    crash(desk.replica, 1)
    engine = desk.replica.become_ready()
    engine.say(1, "text")
    assert not killer.started or len(engine.submits) == 1
    await eventually(lambda: len(engine.submits) == 2, "it has lost its patience")
    crash(desk.replica, 2)
    assert killer.outcome == "engine_crashed"
    with pytest.raises(EngineCrashedTwice):
        await killer.wait_finished()
    with pytest.raises(EngineCrashed) as caught:
        await innocent.wait_finished()
    assert not isinstance(caught.value, EngineCrashedTwice), "it has died twice beside a killer, and is not blamed"
    with pytest.raises(Quarantined):
        desk.submit(prompts=["killer"])
    desk.submit(prompts=["innocent"]).close()


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
