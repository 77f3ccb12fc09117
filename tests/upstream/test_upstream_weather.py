"""Random weather over remote servers: whatever comes in whatever order, the replica's owner lives, slots balance, and a
fair day puts everything right.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from slimproc.replicas.states import ReplicaState
from tests.fakes import eventually, looped
from tests.upstream.harness_upstream import HASTE, UpstreamKeeper, remote
from tests.upstream.standin import Script, StandIn

pytestmark = pytest.mark.slow  # each test waits for whole servers, and there are many

S = ReplicaState
STATES = ["unloaded", "loading", "ready", "unloading", "failed"]
SCRIPTS: list[dict[str, Any]] = [
    {"load_time": 0.05},
    {"load_time": 3600.0},
    {"load_waits": True},
    {"load_refused": (409, "BUSY")},
    {"load_refused": (500, "NO")},
    {"load_fails": "no room"},
    {"unload_time": 0.05},
    {"unload_time": 3600.0},
    {"unload_refused": (409, "BUSY")},
    {"unload_refused": (500, "NO")},
    {"unload_ignored": True},
    {"status_time": 0.03},
    {"status_time": 3600.0},
    {"status_answer": "hello"},
    {"status_code": 500},
    {"extra_active": 1},
    {"healthy": False},
]


class Weather:
    def __init__(self, seed: int, server: StandIn, keeper: UpstreamKeeper) -> None:
        self.dice = random.Random(seed)
        self.server = server
        self.keeper = keeper
        self.slots: list[Any] = []
        self.there = True

    async def blow(self) -> None:
        replica, dice = self.keeper.replica, self.dice
        match dice.randrange(12):
            case 0 | 1:
                replica.ask_start(forgive=dice.random() < 0.5)
            case 2 | 3:
                replica.ask_stop(dice.choice([0.0, 0.01, 3600.0]), abandon=dice.random() < 0.5)
            case 4:
                replica.abandon_drain()
            case 5:
                self.server.script = Script(**dice.choice(SCRIPTS))
            case 6:
                self.server.script = Script()
            case 7:
                self.server.state = dice.choice(STATES)
            case 8:
                await self.come_or_go()
            case 9 if replica.serving is not None and replica.serving.free_slots:
                self.slots.append(replica.serving.take_slot())
            case 10 if self.slots:
                slot = self.slots.pop(dice.randrange(len(self.slots)))
                if dice.random() < 0.3:
                    slot.note_unreachable("it is stormy")
                slot.release()
        await asyncio.sleep(dice.choice([0, 0, 0.001, 0.02]))

    async def come_or_go(self) -> None:
        if not self.there:
            await self.server.open()
        elif self.dice.random() < 0.5:
            await self.server.close()
        else:
            await self.server.die()
        self.there = not self.there

    async def clear_up(self) -> None:
        for slot in self.slots:
            slot.release()
        self.server.script = Script()
        if self.server.state in ("loading", "unloading"):
            self.server.state = "unloaded"  # as if what was begun in the storm had ended
        if not self.there:
            await self.server.open()


@pytest.mark.parametrize("contract", ["control", "none"])
@pytest.mark.parametrize("seed", [*range(6), 111, 139])
@looped
async def test_after_any_storm_a_fair_day_puts_everything_right(seed, contract):
    async with StandIn() as server:
        how = remote(server.url, contract=contract)
        async with UpstreamKeeper(how, load_timeout=0.3, unload_timeout=0.3, status_timeout=0.1, pace=HASTE) as keeper:
            weather = Weather(seed, server, keeper)
            for _ in range(150):
                await weather.blow()
            await weather.clear_up()
            replica = keeper.replica

            def serves() -> bool:
                if replica.state in (S.STOPPED, S.FAILED):
                    replica.ask_start(forgive=True)
                return replica.serving is not None and replica.serving.free_slots == 2

            await eventually(serves, f"{replica} serves: {replica.reason}, {replica.sighting}")
            assert replica.serving is not None
            assert (replica.serving.occupied, replica.sequences, replica.unload_failed) == (0, 0, "")
            await keeper.stop()
            if contract == "control":
                assert server.state == "unloaded"
                assert replica.remains == ""
