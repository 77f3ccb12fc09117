"""The sampler: whatever becomes of the probe or the driver, the memory of all devices goes on being told."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from probing import Holder, Probe

import slimproc
from slimproc.residency.ledger import Ledger
from slimproc.residency.probes.remembered import SILENT
from slimproc.residency.room import Room
from slimproc.residency.sampler import Sampler
from slimproc.residency.views import HOST, World
from tests.fakes import LIMIT, eventually, looped
from tests.processes import lives
from tests.serving import wait_until
from tests.standin_nvml import GIB, LOST, MISMATCH, NO_DRIVER, NOT_SUPPORTED, StandInNvml

PACKAGE = str(Path(slimproc.__file__).parents[1])
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def descriptors(process="self"):
    """What a process has open."""
    found = []
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found.append(str(entry.readlink()))
    return found


class Sampling:
    """A sampler that runs as long as ``async with``, and what it has said."""

    def __init__(self, environ=None, *, stale_after=10 * LIMIT, start_limit=10 * LIMIT, **options):
        self.samples = []
        self.sampler = Sampler(
            self.samples.append,
            environ={**os.environ, "PYTHONPATH": PACKAGE, **(environ or {})},
            stale_after=stale_after,
            start_limit=start_limit,
            **options,
        )

    async def until(self, condition, what):
        """The first sample from now on of which ``condition`` is true."""
        start = len(self.samples)
        await eventually(lambda: any(map(condition, self.samples[start:])), what)
        return next(filter(condition, self.samples[start:]))

    async def heard(self, count=1):
        wanted = len(self.samples) + count
        await eventually(lambda: len(self.samples) >= wanted, "there are samples")
        return self.samples[-1]

    async def replace_probe(self):
        """Kill the probe, and wait for the first sample of another one."""
        pid, statistics = self.sampler.probe_pid, self.sampler.statistics()
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: self.sampler.statistics().probes > statistics.probes, "another probe")
        return await self.heard()

    async def __aenter__(self):
        self.task = asyncio.ensure_future(self.sampler.run())
        return self

    async def __aexit__(self, *_):
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


@pytest.fixture
def nvml(tmp_path):
    return StandInNvml(tmp_path / "nvml")


@pytest.fixture
def gpu(nvml):
    return nvml.add_gpu(total=24 * GIB)


@pytest.fixture
def probe_that(tmp_path):
    """The environment in which ``python -m slimproc.residency.probes`` is this code."""

    def make(code):
        folder = tmp_path / "package"
        probes = folder / "slimproc/residency/probes"
        probes.mkdir(parents=True)
        for package in (folder / "slimproc", folder / "slimproc/residency", probes):
            (package / "__init__.py").write_text("")
        (probes / "__main__.py").write_text(code)
        return {"PYTHONPATH": str(folder)}

    return make


GOOD = """
import json, sys, time
def line(free, ago=0.0):
    host = {"kind": "host", "name": "host memory", "total": 1000, "free": free}
    return json.dumps({"taken": time.monotonic() - ago, "devices": {"host": host}}) + "\\n"
def say(text):
    sys.stdout.write(text)
    sys.stdout.flush()
"""


# --- as long as all is well -----------------------------------------------------------------------------------


def test_samples_come_under_asyncios_own_loop_as_well(nvml, gpu):
    async def main():
        async with Sampling(nvml.environ) as sampling:
            sample = await sampling.heard()
            assert list(sample.devices) == [HOST, gpu.uuid]

    asyncio.run(main())


@looped
async def test_every_sample_is_newer_than_the_one_before(nvml, gpu):
    async with Sampling(nvml.environ) as sampling:
        await sampling.heard(4)
        taken = [sample.taken for sample in sampling.samples]
        assert taken == sorted(set(taken))
        assert sampling.sampler.latest is sampling.samples[-1]
        assert sampling.sampler.driver == ""
        assert sampling.sampler.statistics().own == 0


@looped
async def test_whoever_is_watched_has_his_bytes_told_apart_and_no_longer_than_that(nvml, gpu):
    with Holder() as first, Holder() as second:
        gpu.allocate(first.child, GIB)
        gpu.allocate(second.child, 2 * GIB)
        async with Sampling(nvml.environ) as sampling:
            sampling.sampler.watch([first.leader])
            await sampling.until(lambda sample: sample.devices[gpu.uuid].attributed == {first.leader: GIB}, "the first")
            sampling.sampler.watch([second.leader])
            sample = await sampling.until(
                lambda sample: sample.devices[gpu.uuid].attributed == {second.leader: 2 * GIB}, "the second"
            )
            assert set(sample.devices[HOST].attributed) == {second.leader}
            await sampling.replace_probe()
            sampling.sampler.watch([])
            await sampling.until(lambda sample: not sample.devices[HOST].attributed, "nobody")


@looped
async def test_a_probe_that_follows_another_knows_whom_to_watch(nvml, gpu):
    with Holder() as holder:
        gpu.allocate(holder.child, GIB)
        async with Sampling(nvml.environ) as sampling:
            sampling.sampler.watch([holder.leader])
            await sampling.heard()
            await sampling.replace_probe()
            await sampling.until(lambda sample: sample.devices[gpu.uuid].attributed, "its bytes")


@looped
async def test_a_machine_without_a_gpu_is_told_of_in_one_line(tmp_path, caplog):
    caplog.set_level("INFO")
    async with Sampling({"LD_LIBRARY_PATH": str(tmp_path)}) as sampling:
        sample = await sampling.heard(2)
        await sampling.replace_probe()
        await sampling.heard()
    assert list(sample.devices) == [HOST]
    assert sampling.sampler.driver == "absent"
    assert [record.levelname for record in caplog.records if "driver" in record.message] == ["INFO"]


@looped
async def test_the_configured_limit_reaches_the_probe():
    async with Sampling(host_limit=123 << 20) as sampling:
        assert (await sampling.heard()).devices[HOST].total == 123 << 20


# --- the probe ------------------------------------------------------------------------------------------------


@looped
async def test_a_probe_that_is_killed_is_followed_by_another(nvml, gpu):
    async with Sampling(nvml.environ) as sampling:
        await sampling.heard()
        first = sampling.sampler.probe_pid
        sample = await sampling.replace_probe()
        assert sampling.sampler.probe_pid != first
        assert sample.devices[gpu.uuid].fault == ""
        assert sampling.sampler.statistics().undead == 0


@linux
@looped
async def test_a_probe_that_says_nothing_is_killed_and_followed_by_another(nvml, gpu):
    async with Sampling(nvml.environ, stale_after=1.0) as sampling:
        await sampling.until(lambda sample: gpu.uuid in sample.devices, "the GPU")
        stopped = sampling.sampler.probe_pid
        os.kill(stopped, signal.SIGSTOP)
        await eventually(lambda: sampling.sampler.probe_pid not in (None, stopped), "another probe")
        await sampling.until(lambda sample: not sample.devices[gpu.uuid].fault, "the GPU is well")
        assert sampling.sampler.statistics().silent >= 1
        assert not psutil.pid_exists(stopped)


@looped
async def test_while_the_driver_hangs_the_host_is_sampled_and_nothing_is_loaded_on_its_gpus(nvml, gpu):
    async with Sampling(nvml.environ, stale_after=1.0, start_limit=3.0) as sampling:
        await sampling.until(lambda sample: gpu.uuid in sample.devices, "the GPU")
        with Holder(64) as holder:
            sampling.sampler.watch([holder.leader])
            gpu.hang(3600)
            sample = await sampling.until(
                lambda sample: sample.devices[gpu.uuid].fault and sample.devices[HOST].attributed,
                "the front's own sample",
            )
            assert sample.devices[gpu.uuid].fault == SILENT
            assert (sample.devices[gpu.uuid].free, sample.devices[gpu.uuid].total) == (0, 24 * GIB)
            assert sample.devices[HOST].free > 0
            assert sample.devices[HOST].attributed[holder.leader] > 64 << 20
            await eventually(lambda: sampling.sampler.statistics().own >= 2, "it goes on")
        gpu.hang(0)
        sample = await sampling.until(lambda sample: not sample.devices[gpu.uuid].fault, "the GPU is well")
        assert sample.devices[gpu.uuid].free == 24 * GIB


@looped
async def test_a_driver_that_hangs_from_the_start_does_not_keep_the_host_from_being_sampled(nvml, gpu):
    nvml.hang_init(3600)
    async with Sampling(nvml.environ, stale_after=0.5, start_limit=0.5) as sampling:
        sample = await sampling.heard()
        assert list(sample.devices) == [HOST]
        assert sampling.sampler.driver is None, "nobody knows which GPUs there are"


@pytest.mark.slow
@looped
async def test_while_a_probe_is_silent_the_fronts_samples_come_as_often_as_they_can(probe_that):
    """Each is measured against the probe's last word, and not against the one before."""
    code = GOOD + "say(line(1))\ntime.sleep(3600)\n"
    async with Sampling(probe_that(code), stale_after=2.0, start_limit=10 * LIMIT) as sampling:
        await sampling.heard()
        await eventually(lambda: sampling.sampler.statistics().own >= 3, "the front samples")
        taken = [sample.taken for sample in sampling.samples if sample.devices[HOST].free != 1][:3]
    gaps = [later - earlier for earlier, later in itertools.pairwise(taken)]
    assert min(gaps) < 3.0


@looped
async def test_a_gpu_whose_memory_is_the_hosts_takes_nothing_from_it_when_it_is_in_no_state_to_answer(nvml, gpu):
    gpu.fail_memory(NOT_SUPPORTED)
    async with Sampling(nvml.environ, stale_after=1.0, start_limit=3.0) as sampling:
        await sampling.until(lambda sample: sample.devices.get(gpu.uuid, sample.devices[HOST]).kind == "unified", "it")
        for spoil, mend in (
            (lambda: gpu.hang(3600), lambda: gpu.hang(0)),
            (lambda: gpu.fail(LOST), lambda: gpu.fail(0)),
        ):
            spoil()
            sample = await sampling.until(lambda sample: sample.devices[gpu.uuid].fault, "the fault")
            seen = sample.devices[gpu.uuid]
            assert (seen.kind, seen.free) == ("unified", sample.devices[HOST].free)
            ledger = Ledger(0, 1e9)
            ledger.observe(sample)
            room = Room(World(sample.taken, ledger.views(sample.taken), ()))
            assert room.now[HOST].bytes == sample.devices[HOST].free
            mend()
            if sampling.sampler.probe_pid is not None:
                await sampling.replace_probe()
            await sampling.until(lambda sample: not sample.devices[gpu.uuid].fault, "it is well again")


@looped
async def test_nonsense_between_good_lines_is_passed_over(probe_that, caplog):
    code = (
        GOOD
        + """
say(line(1))
for text in ("nonsense\\n", "\\n", "\\xff" * 100 + "\\n", "[" * 100000 + "\\n"):
    time.sleep(0.05)
    say(text)
say(line(2))
time.sleep(3600)
"""
    )
    async with Sampling(probe_that(code)) as sampling:
        await sampling.until(lambda sample: sample.devices[HOST].free == 2, "the line after the nonsense")
        assert sampling.sampler.statistics().probes == 1
    assert "nonsense" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("text", ["'x\\n' * 100", "'x' * 10_000_000", '\'{"taken": 0, "devices": {}}\\n\' * 100'])
@looped
async def test_a_probe_that_writes_only_nonsense_is_replaced(probe_that, text):
    async with Sampling(probe_that(GOOD + f"say({text})\ntime.sleep(3600)\n")) as sampling:
        await eventually(lambda: sampling.sampler.statistics().probes >= 2, "another probe")
        assert sampling.samples == []


@looped
async def test_of_lines_that_wait_only_the_newest_counts(probe_that):
    code = GOOD + "say(''.join(map(line, range(400))))\ntime.sleep(3600)\n"
    async with Sampling(probe_that(code)) as sampling:
        await sampling.until(lambda sample: sample.devices[HOST].free == 399, "the newest")
        assert len(sampling.samples) < 100


@looped
async def test_what_was_taken_before_the_latest_is_not_told(probe_that):
    code = (
        GOOD
        + """
for text in (line(1), line(2, ago=5.0), line(3)):
    say(text)
    time.sleep(0.2)
time.sleep(3600)
"""
    )
    async with Sampling(probe_that(code)) as sampling:
        await sampling.until(lambda sample: sample.devices[HOST].free == 3, "the last")
        assert all(sample.devices[HOST].free != 2 for sample in sampling.samples)


@looped
async def test_a_probe_that_cannot_run_leaves_the_host_to_the_front(probe_that, caplog):
    code = "import sys\nsys.exit('the probe has no library')\n"
    async with Sampling(probe_that(code), stale_after=0.5, start_limit=0.5) as sampling:
        sample = await sampling.heard(2)
        await eventually(lambda: sampling.sampler.statistics().probes >= 2, "it is tried again")
    assert list(sample.devices) == [HOST]
    assert "the probe has no library" in caplog.text


@linux
@looped
async def test_where_no_process_can_be_started_the_front_samples_the_host(monkeypatch):
    def refuse(*_args, **_options):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "posix_spawn", refuse)
    before = len(descriptors())
    async with Sampling(stale_after=0.2, start_limit=0.2) as sampling:
        await sampling.heard(2)
    assert len(descriptors()) == before
    assert sampling.sampler.statistics().probes == 0


@linux
@looped
async def test_the_probe_inherits_nothing_and_hears_no_interrupt(nvml, gpu):
    inherited = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(inherited, True)
    try:
        async with Sampling(nvml.environ) as sampling:
            await sampling.heard()
            pid = sampling.sampler.probe_pid
            opened = descriptors(pid)
            assert all(target.startswith("pipe:") for target in opened), opened
            assert os.getsid(pid) == pid
            os.kill(pid, signal.SIGINT)
            await sampling.heard(2)
            assert sampling.sampler.probe_pid == pid
    finally:
        os.close(inherited)


@linux
@looped
async def test_the_end_leaves_no_process_and_no_descriptor(nvml, gpu):
    before = len(descriptors())
    for _ in range(2):
        async with Sampling(nvml.environ) as sampling:
            await sampling.heard()
            pid = sampling.sampler.probe_pid
        assert not psutil.pid_exists(pid)
    assert len(descriptors()) == before
    assert sampling.sampler.statistics().undead == 0


@looped
async def test_a_bug_in_who_is_told_ends_the_sampler_and_the_probe(nvml, gpu):
    def fail(sample):
        raise ZeroDivisionError

    sampler = Sampler(fail, environ={**os.environ, "PYTHONPATH": PACKAGE, **nvml.environ})
    with pytest.raises(ExceptionGroup) as caught:
        await sampler.run()
    assert isinstance(caught.value.exceptions[0], ZeroDivisionError)
    assert sampler.probe_pid is None


@linux
@pytest.mark.parametrize("hangs", [False, True])
def test_the_probe_dies_with_the_front_also_while_it_hangs_in_the_driver(nvml, gpu, hangs):
    code = """
import asyncio, os
from slimproc.residency.sampler import Sampler
async def main():
    sampler = Sampler(lambda sample: None, environ=dict(os.environ), start_limit=1000)
    running = asyncio.create_task(sampler.run())
    while sampler.probe_pid is None:
        await asyncio.sleep(0.01)
    print(sampler.probe_pid, flush=True)
    await running
asyncio.run(main())
"""
    nvml.hang_init(3600 if hangs else 0)
    environ = {**os.environ, "PYTHONPATH": PACKAGE, **nvml.environ}
    with subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE) as front:
        probe = psutil.Process(int(front.stdout.readline()))
        loaded = Path(f"/proc/{probe.pid}/maps")
        wait_until(lambda: "libnvidia-ml" in loaded.read_text(), "it has loaded the driver")
        front.kill()
        wait_until(lambda: not lives(probe), "the probe is gone")


def test_the_probe_ends_when_the_front_closes_its_end():
    with Probe() as probe:
        probe.line()
        probe.process.stdin.close()
        probe.process.stdin = None
        assert probe.exit() == (0, "")


# --- the driver -----------------------------------------------------------------------------------------------


@looped
async def test_a_mismatch_is_a_fault_of_the_gpus_that_were_there_once_two_probes_have_seen_it(nvml, gpu):
    async with Sampling(nvml.environ) as sampling:
        await sampling.heard()
        nvml.fail_init(MISMATCH)
        os.kill(sampling.sampler.probe_pid, signal.SIGKILL)
        sample = await sampling.until(lambda sample: sample.devices[gpu.uuid].fault, "the fault")
        assert sample.devices[gpu.uuid].fault == "driver_mismatch"
        assert sample.devices[gpu.uuid].total == 24 * GIB
        assert sample.devices[HOST].free > 0
        assert sampling.sampler.driver == "driver_mismatch"
        assert sampling.sampler.statistics().probes == 3, "the second probe left it to the third"
        nvml.fail_init(0)
        assert (await sampling.replace_probe()).devices[gpu.uuid].fault == ""


@looped
async def test_a_driver_that_is_gone_is_a_fault_of_the_gpus_that_were_there(nvml, gpu):
    async with Sampling(nvml.environ) as sampling:
        await sampling.heard()
        nvml.fail_init(NO_DRIVER)
        sample = await sampling.replace_probe()
        assert sample.devices[gpu.uuid].fault.startswith("unknown: ")
        await sampling.heard(2)
        assert sampling.samples[-1].devices[gpu.uuid].fault.startswith("unknown: ")
        assert sampling.sampler.driver.startswith("unknown: "), "there was a GPU: it is not absent"


@looped
async def test_a_gpu_that_is_lost_to_a_new_probe_as_well_is_still_there_and_lost(nvml, gpu):
    good = nvml.add_gpu()
    async with Sampling(nvml.environ) as sampling:
        await sampling.heard()
        gpu.fail(LOST)
        sample = await sampling.replace_probe()
        assert sample.devices[gpu.uuid].fault == "lost"
        assert sample.devices[good.uuid].fault == ""
        gpu.fail(0)
        sample = await sampling.replace_probe()
        assert sample.devices[gpu.uuid].fault == ""
        assert sample.devices[gpu.uuid].free == gpu.total


@looped
async def test_a_gpu_that_never_told_its_name_leaves_it_unknown_which_there_are(nvml, gpu):
    good = nvml.add_gpu()
    gpu.fail(LOST)
    async with Sampling(nvml.environ) as sampling:
        assert set((await sampling.heard()).devices) == {HOST, good.uuid}
        assert sampling.sampler.driver == "unknown: GPU 0 does not tell its UUID (lost)"
        gpu.fail(0)
        await sampling.replace_probe()
        assert sampling.sampler.driver == ""
        gpu.fail(LOST)
        await sampling.replace_probe()
        assert sampling.sampler.driver == "", "its name is known from before"


@looped
async def test_an_instance_that_a_working_driver_does_not_list_is_no_device_any_more(nvml, gpu):
    first, second = gpu.add_mig(total=GIB), gpu.add_mig(total=2 * GIB)
    async with Sampling(nvml.environ) as sampling:
        assert set((await sampling.heard()).devices) == {HOST, first.uuid, second.uuid}
        second.remove()
        assert set((await sampling.replace_probe()).devices) == {HOST, first.uuid}


@looped
async def test_faults_are_logged_when_they_come_and_when_they_go_and_not_at_every_sample(nvml, gpu, caplog):
    caplog.set_level("INFO")
    async with Sampling(nvml.environ) as sampling:
        await sampling.heard()
        gpu.fail(LOST)
        await sampling.until(lambda sample: sample.devices[gpu.uuid].fault, "the fault")
        await sampling.heard(3)
        gpu.fail(0)
        await sampling.replace_probe()
    messages = [record.message for record in caplog.records]
    assert messages.count("nothing is loaded on this GPU") == 1
    assert messages.count("nothing is wrong with this GPU any more") == 1


# --- without a probe ------------------------------------------------------------------------------------------


def test_the_front_can_sample_the_host_at_once():
    sampler = Sampler(lambda sample: None, environ={})
    with Holder() as holder:
        sampler.watch([holder.leader])
        sample = sampler.sample_now()
    assert list(sample.devices) == [HOST]
    assert set(sample.devices[HOST].attributed) == {holder.leader}
    assert sampler.latest is None
    assert "probe=None watching 1" in repr(sampler)
