"""What an operator is told who waits for a load or an unload, with real replicas and residency in virtual time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from slimproc.errors import InsufficientMemory, InvalidRequest, LifecyclePending, ModelFailed, NotReady, UnloadFailed
from slimproc.http import lifecycle
from slimproc.replicas.states import ReplicaState
from slimproc.residency.views import HOST
from tests.residency.house import House, Settings
from tests.residency.test_manager import virtual

READY, STOPPED = ReplicaState.READY, ReplicaState.STOPPED
GPU = "GPU-0"


def gateway(house: House) -> Any:
    return SimpleNamespace(
        residency=house.manager,
        supervisor=SimpleNamespace(of=lambda name: [unit.replica for unit in house.of(name)]),
        config=SimpleNamespace(drain_timeout=180.0),
        admission=SimpleNamespace(suspects=SimpleNamespace(clear=lambda _: None)),
    )


def model(name: str, *, managed: bool = True) -> Any:
    return SimpleNamespace(name=name, managed=managed, prepare_timeout=5.0, load_timeout=60.0, unload_timeout=30.0)


@virtual
async def test_an_unload_is_done_when_what_ran_has_ended_though_others_have_asked_for_it_again():
    async with House(Settings("a", load_time=0.0, unload_time=0.0)) as house:
        await house.until_answered(house.ask("a"))
        first = house.life("a")
        busy = house.ask("a", takes=3.0)
        unloading = asyncio.create_task(lifecycle.unload(gateway(house), model("a")))
        await house.until_state("a", ReplicaState.DRAINING)
        waiting = [house.ask("a", takes=1000.0), house.ask("a", takes=1000.0)]
        async with asyncio.timeout(10.0):
            assert await unloading == "unloaded"
        assert first.status is not None
        assert busy.outcomes == ["served"]
        assert house.state("a") is READY
        assert house.life("a").taken == waiting
        house.life("a").taken.clear()


@virtual
async def test_an_unload_that_fails_is_told_at_once_and_why():
    async with House(Settings("a", remote=True, unload_time=9.0)) as house:
        await house.until_answered(house.ask("a"))
        unloading = asyncio.create_task(lifecycle.unload(gateway(house), model("a")))
        await house.until_state("a", ReplicaState.STOPPING)
        house.life("a").unload_failed = "it answered an unload with ready"
        async with asyncio.timeout(1.0):
            with pytest.raises(UnloadFailed, match="a could not be unloaded: it answered an unload with ready"):
                await unloading


@virtual
async def test_an_unload_of_a_server_that_does_not_say_so_is_no_unload():
    async with House(Settings("a", remote=True)) as house:
        await house.until_answered(house.ask("a"))
        house.sources["a/0"].see("unknown", "resident")
        for _ in range(2):
            with pytest.raises(UnloadFailed, match="its server is unknown"):
                await lifecycle.unload(gateway(house), model("a"))
        house.sources["a/0"].see("unloaded", "not_resident")
        assert await lifecycle.unload(gateway(house), model("a")) == "unloaded"


@virtual
async def test_a_server_that_is_simply_there_is_not_unloaded():
    async with House(Settings("a")) as house:
        with pytest.raises(InvalidRequest, match="nobody loads or unloads"):
            await lifecycle.unload(gateway(house), model("a", managed=False))


@virtual
async def test_a_load_is_done_though_the_model_had_to_go_again_at_once():
    async with House(Settings("a", unload_time=0.0), Settings("b", load_time=0.0)) as house:
        loading = asyncio.create_task(lifecycle.load(gateway(house), model("a")))
        await house.until_state("a", ReplicaState.STARTING)
        others = house.ask("b", takes=1000.0)
        async with asyncio.timeout(10.0):
            assert await loading == "loaded"
        await house.until_state("b", READY)
        assert house.state("a") is STOPPED
        house.life("b").taken.remove(others)


@virtual
async def test_who_cannot_be_loaded_is_told_what_stands_in_the_way():
    units = [Settings("a", remote=True, unload_time=9.0), Settings("b"), Settings("c", bytes=101), Settings("g")]
    units[3].devices = (GPU,)
    async with House(*units, totals={HOST: 100, GPU: 100}) as house:
        house.faults[GPU] = "driver_mismatch"
        await house.until_answered(house.ask("a"))
        with pytest.raises(InsufficientMemory, match="c needs 101 bytes") as caught:
            await lifecycle.load(gateway(house), model("c"))
        assert (caught.value.plan["needed"], caught.value.plan["code"]) == (101, "insufficient_memory")
        with pytest.raises(NotReady, match="driver_mismatch"):
            await lifecycle.load(gateway(house), model("g"))
        house.manager.unload("a")
        await house.until_state("a", ReplicaState.STOPPING)
        house.life("a").unload_failed = "it is stuck"
        with pytest.raises(LifecyclePending, match="until a/0 has been unloaded: it is stuck"):
            await lifecycle.load(gateway(house), model("b"))


@virtual
async def test_who_fails_in_its_load_is_told_its_own_reason():
    async with House(Settings("a", load_error="no such file")) as house:
        with pytest.raises(ModelFailed, match="no such file"):
            await lifecycle.load(gateway(house), model("a"))
