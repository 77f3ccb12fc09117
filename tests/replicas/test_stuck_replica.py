"""A replica whose process does not end, whatever it is sent: the stand-in is a stopped one whose SIGKILL goes nowhere."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from slimproc.errors import EngineCrashed
from slimproc.ipc import wire
from slimproc.replicas import owner
from slimproc.replicas.process import EngineProcess
from slimproc.replicas.states import ReplicaState
from slimproc.replicas.supervisor import Supervisor
from tests.fakes import LIMIT, eventually, looped, turns
from tests.replicas.harness import Keeper, script

S = ReplicaState
ENDLESS = script(tokens=["a"], repeat=1_000_000, token_latency=0.005)


@pytest.fixture(autouse=True)
def _deaf(monkeypatch):
    monkeypatch.setattr(owner, "KILL_LIMIT", 0.05)
    monkeypatch.setattr(EngineProcess, "signal", lambda *_: None)


@looped
async def test_what_is_in_an_engine_that_cannot_be_killed_ends_once_and_the_replica_waits_for_its_end():
    async with Keeper(stall_timeout=0.3) as keeper:
        first = await keeper.start()
        stream = keeper.generate(ENDLESS, None)
        await eventually(lambda: stream.completion_tokens > 1, "it runs")
        os.kill(first.pid, signal.SIGSTOP)
        asking = asyncio.ensure_future(
            first.ask(lambda number: wire.Tokenize(number, "x", add_special=False, parse_special=False))
        )
        await eventually(lambda: keeper.replica.stuck, "it is given up")
        assert isinstance(stream.error, EngineCrashed)
        assert "made no step" in stream.error.message
        with pytest.raises(Exception, match="made no step"):
            await asking
        assert keeper.replica.state is S.KILLING
        assert keeper.replica.statistics().reason == keeper.replica.unload_failed == keeper.replica.stuck
        assert f"process {first.pid} does not end" in keeper.replica.stuck

        os.kill(first.pid, signal.SIGKILL)
        second = await keeper.until_ready(after=first)
        assert keeper.replica.stuck == ""
        assert keeper.states == [S.STOPPED, S.STARTING, S.READY, S.KILLING, S.BACKOFF, S.STARTING, S.READY]
        assert stream.ends == 1
        os.kill(second.pid, signal.SIGKILL)  # the keeper could not
        await eventually(lambda: second.dead, "it is gone")


@pytest.mark.parametrize("when", ["before the stop", "in the stop"])
@looped
async def test_a_stop_of_all_ends_although_one_process_does_not(when):
    async with Keeper(stall_timeout=0.3) as keeper:
        engine = await keeper.start()
        supervisor = Supervisor([keeper.replica])
        if when == "before the stop":
            keeper.generate(ENDLESS, None)
        os.kill(engine.pid, signal.SIGSTOP)
        if when == "before the stop":
            await eventually(lambda: keeper.replica.stuck, "it is given up")
        async with asyncio.timeout(LIMIT):
            await supervisor.stop_all(0.0, 0.05)
        await turns()
        assert keeper.replica.state is S.STOPPING
        assert supervisor.count_stuck() == {"m": 1}
        os.kill(engine.pid, signal.SIGKILL)
        await keeper.until(S.STOPPED)
        assert supervisor.count_stuck() == {"m": 0}
