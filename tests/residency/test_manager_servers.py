"""The manager and servers that are not ours: what is done before they are known, and when they fail."""

import asyncio

import pytest

from slimproc.errors import InsufficientMemory
from slimproc.replicas.states import ReplicaState
from tests.residency.house import House, Settings
from tests.residency.test_manager import virtual
from tests.residency.virtual import until

READY, FAILED = ReplicaState.READY, ReplicaState.FAILED


@virtual
async def test_a_server_that_has_not_been_asked_yet_costs_neither_the_start_nor_a_request_its_model():
    async with House(Settings("r", remote=True), Settings("a", bytes=30), Settings("b", bytes=30)) as house:
        server = house.sources["r/0"]
        server.see("unknown", None, asked=False)
        house.manager.preload("a")
        asked = house.ask("b")
        await asyncio.sleep(3.0)
        assert (asked.outcomes, house.lives) == ([], [])
        assert house.manager.wanted("a")

        server.see("unloaded", "not_resident")

        await house.until_state("a", READY)
        await house.until_answered(asked)
        assert asked.outcomes == ["served"]


@virtual
async def test_a_server_that_was_asked_in_vain_is_told_to_those_who_waited_for_its_answer():
    async with House(Settings("r", remote=True), Settings("a", bytes=30), Settings("b", bytes=30)) as house:
        server = house.sources["r/0"]
        server.see("unknown", None, asked=False)
        house.manager.preload("a")
        asked = house.ask("b")
        await asyncio.sleep(3.0)

        server.see("unknown", None)

        await house.until_answered(asked)
        assert isinstance(asked.outcomes[0], InsufficientMemory)
        await until(lambda: not house.manager.wanted("a"), "the start is over")
        assert house.lives == []
        server.see("unloaded", "not_resident")


@pytest.mark.parametrize("how", ["load", "preload"])
@virtual
async def test_a_server_that_fails_in_its_load_and_keeps_its_memory_is_not_loaded_again_and_again(how):
    """Its hold stays, and the wish for it is over: it is asked again when somebody asks, and not before."""
    async with House(Settings("r", remote=True, load_error="no weights"), Settings("a")) as house:
        server = house.sources["r/0"]
        getattr(house.manager, how)("r")
        await until(lambda: house.lives, "it is asked to load")
        server.see("failed", "unknown")
        await house.until_state("r", FAILED)
        loads = len(house.lives)
        await asyncio.sleep(30.0)
        assert len(house.lives) == loads
        assert not house.manager.wanted("r")
        assert house.ledger.held("r/0") == 60
        refused = house.ask("a")
        await house.until_answered(refused)
        assert isinstance(refused.outcomes[0], InsufficientMemory)

        house.of("r")[0].config.load_error = ""
        house.manager.load("r")
        await house.until_state("r", READY)
        server.see("unloaded", "not_resident")


@virtual
async def test_a_load_that_nobody_waits_for_any_more_is_ended_well_and_makes_room_for_who_waits():
    """Its model is not protected: nobody had it, so nobody can want it back at once."""
    async with House(Settings("a", load_time=5.0, min_resident=60.0), Settings("b")) as house:
        leaver = house.ask("a")
        await house.until_state("a", ReplicaState.STARTING)
        house.leave(leaver)
        asked = house.ask("b")
        await house.until_answered(asked, limit=30.0)
        assert asked.outcomes == ["served"]
        assert [life.name for life in house.lives] == ["a/0", "b/0"]
