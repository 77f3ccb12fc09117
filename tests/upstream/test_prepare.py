"""The command that brings a remote server up: when it is run, how, and what becomes of what it starts."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from slimproc.replicas.states import ReplicaState
from slimproc.upstream.prepare import Prepare, PrepareFailed
from tests.fakes import LIMIT, eventually, looped, turns
from tests.processes import lives
from tests.upstream.harness_upstream import UpstreamKeeper, closed_port, remote
from tests.upstream.standin import StandIn

S = ReplicaState


def script(folder: Path, text: str) -> tuple[str, ...]:
    path = folder / "prepare"
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="ascii")
    path.chmod(0o755)
    return (str(path),)


@looped
async def test_a_server_that_is_not_there_is_prepared_and_then_loaded(tmp_path):
    server = StandIn(port=closed_port())
    argv = script(tmp_path, f"pwd > {tmp_path}/where; echo $MARK > {tmp_path}/mark; echo once >> {tmp_path}/runs")
    environ = dict(os.environ) | {"MARK": "inherited"}
    async with UpstreamKeeper(remote(server.url, prepare=argv), environ=environ) as keeper:
        await keeper.until_seen("unknown")
        await eventually(lambda: keeper.replica.sighting.asked, "it was asked")
        assert not (tmp_path / "runs").exists(), "looking does not prepare"
        keeper.replica.ask_start()
        await eventually((tmp_path / "runs").exists, "it is prepared")
        async with server:
            await keeper.until_ready()
            assert server.loads == 1, "preparing loads nothing"
        assert (tmp_path / "where").read_text().strip() == str(tmp_path)
        assert (tmp_path / "mark").read_text().strip() == "inherited"
        assert (tmp_path / "runs").read_text() == "once\n"


@looped
async def test_a_server_that_is_there_is_not_prepared(tmp_path):
    argv = script(tmp_path, f"touch {tmp_path}/ran")
    async with StandIn() as server, UpstreamKeeper(remote(server.url, prepare=argv)) as keeper:
        await keeper.start()
        assert not (tmp_path / "ran").exists()


@looped
async def test_without_prepare_a_server_that_is_not_there_is_told_at_once():
    async with UpstreamKeeper(remote(f"http://127.0.0.1:{closed_port()}")) as keeper:
        keeper.replica.ask_start()
        await eventually(lambda: S.BACKOFF in keeper.states, "it is told")
        assert "cannot be reached" in keeper.replica.reason


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo the image is missing >&2; exit 5", "prepare exited with 5: the image is missing"),
        ("kill -9 $$", "prepare was ended by SIGKILL"),
        ("sleep 3600", "was not done within 0.5 s, and was killed"),
        ("exit 0", "0.5 s after prepare was begun"),
    ],
    ids=["fails", "dies", "hangs", "in vain"],
)
@looped
async def test_a_prepare_that_comes_to_nothing_is_a_failed_load(tmp_path, text, words):
    url = f"http://127.0.0.1:{closed_port()}"
    argv = script(tmp_path, text)
    async with UpstreamKeeper(remote(url, prepare=argv), prepare_timeout=0.5) as keeper:
        keeper.replica.ask_start()
        await eventually(lambda: S.BACKOFF in keeper.states, "it has failed")
        assert words in keeper.replica.reason
        assert keeper.replica.load_failed


@looped
async def test_a_command_that_cannot_be_run_says_so():
    prepare = Prepare("m/0", ("/no/such/folder/prepare",), dict(os.environ))
    with pytest.raises(PrepareFailed, match=r"127: cannot run /no/such/folder/prepare: No such file"):
        await prepare.run(LIMIT)


@looped
async def test_a_prepare_that_hangs_is_killed_with_all_that_it_started(tmp_path):
    argv = script(tmp_path, f"sleep 3600 & echo $! > {tmp_path}/pid; sleep 3600")
    prepare = Prepare("m/0", argv, dict(os.environ))
    running = asyncio.ensure_future(prepare.run(LIMIT))
    await eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "it runs")
    process = psutil.Process(int((tmp_path / "pid").read_text()))
    prepare.kill()
    with pytest.raises(PrepareFailed, match="ended by SIGKILL"):
        await running
    await eventually(lambda: not lives(process), "it is gone")
    prepare._forget_last()


@looped
async def test_what_a_prepare_leaves_running_stays(tmp_path):
    argv = script(tmp_path, f"sleep 3600 & echo $! > {tmp_path}/pid")
    prepare = Prepare("m/0", argv, dict(os.environ))
    await prepare.run(LIMIT)
    left = psutil.Process(int((tmp_path / "pid").read_text()))
    await turns(50)
    assert left.status() != psutil.STATUS_ZOMBIE
    os.killpg(os.getpgid(left.pid), signal.SIGKILL)
    prepare._forget_last()


@looped
async def test_it_never_runs_twice_at_once_and_those_who_ask_meanwhile_share_the_run(tmp_path):
    argv = script(tmp_path, f"echo run >> {tmp_path}/runs; while [ ! -e {tmp_path}/go ]; do sleep 0.01; done")
    prepare = Prepare("m/0", argv, dict(os.environ))
    first, second, leaver = (asyncio.ensure_future(prepare.run(LIMIT)) for _ in range(3))
    await eventually((tmp_path / "runs").exists, "it runs")
    leaver.cancel()
    late = asyncio.ensure_future(prepare.run(LIMIT))
    await turns()
    (tmp_path / "go").touch()
    await asyncio.gather(first, second, late)
    assert (tmp_path / "runs").read_text() == "run\n"
    await prepare.run(LIMIT)
    assert (tmp_path / "runs").read_text() == "run\nrun\n"
    prepare._forget_last()


@looped
async def test_two_servers_of_a_model_share_one_prepare(tmp_path):
    one, two = StandIn(port=closed_port()), StandIn(port=closed_port())
    argv = script(tmp_path, f"echo run >> {tmp_path}/runs; sleep 0.2")
    async with UpstreamKeeper(remote(one.url, two.url, prepare=argv)) as keeper:
        for replica in keeper.replicas:
            replica.ask_start()
        await eventually((tmp_path / "runs").exists, "it runs")
        async with one, two:
            await eventually(lambda: all(replica.serving for replica in keeper.replicas), "both serve")
            assert (tmp_path / "runs").read_text() == "run\n"


@looped
async def test_a_run_for_which_another_waits_outlives_who_is_let_go(tmp_path):
    one, two = StandIn(port=closed_port()), StandIn(port=closed_port())
    argv = script(tmp_path, f"echo run >> {tmp_path}/runs; while [ ! -e {tmp_path}/go ]; do sleep 0.01; done")
    async with UpstreamKeeper(remote(one.url, two.url, prepare=argv)) as keeper:
        first, second = keeper.replicas
        for replica in keeper.replicas:
            replica.ask_start()
        await eventually((tmp_path / "runs").exists, "it runs")
        await eventually(lambda: second.life and second.life._loading.preparing, "both wait for it")
        first.ask_stop(0.0, 1.0, leave=True)
        await keeper.until(S.STOPPED)
        (tmp_path / "go").touch()
        async with two:
            await eventually(lambda: second.serving, "the other one serves")
        assert (tmp_path / "runs").read_text() == "run\n"


@looped
async def test_a_run_for_which_nobody_else_waits_is_killed_when_its_server_is_let_go(tmp_path):
    url = f"http://127.0.0.1:{closed_port()}"
    argv = script(tmp_path, f"echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; sleep 3600")
    async with UpstreamKeeper(remote(url, prepare=argv)) as keeper:
        keeper.replica.ask_start()
        await eventually((tmp_path / "pid").exists, "it prepares")
        process = psutil.Process(int((tmp_path / "pid").read_text()))
        keeper.replica.ask_stop(0.0, 1.0, leave=True)
        await keeper.until(S.STOPPED)
        await eventually(lambda: not lives(process), "it is gone")


@looped
async def test_a_stop_while_it_prepares_does_not_wait_for_it(tmp_path):
    url = f"http://127.0.0.1:{closed_port()}"
    async with UpstreamKeeper(remote(url, prepare=script(tmp_path, f"touch {tmp_path}/ran; sleep 3600"))) as keeper:
        keeper.replica.ask_start()
        await eventually((tmp_path / "ran").exists, "it prepares")
        await keeper.stop()
