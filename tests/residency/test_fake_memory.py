"""The fake backend's GPU memory on the stand-in driver: what fits, what does not, and who gives it back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from probing import Probe

import slimproc
from slimproc.engines.fake import memory
from slimproc.engines.fake.backend import FakeBackend
from slimproc.errors import LoadFailed
from slimproc.settings import EngineSettings, FakeSettings
from tests.standin_nvml import GIB, LOST, StandInNvml

NVML_OF_NOBODY = {"CUDA_VISIBLE_DEVICES": "GPU-1"}


@pytest.fixture
def nvml(tmp_path):
    return StandInNvml(tmp_path / "nvml")


@pytest.fixture
def gpu(nvml):
    return nvml.add_gpu(total=8 * GIB)


@pytest.fixture
def environ(nvml, gpu, monkeypatch):
    """As an engine on ``gpu`` has it."""
    for name, value in {**nvml.environ, "CUDA_VISIBLE_DEVICES": gpu.uuid}.items():
        monkeypatch.setenv(name, value)


def backend(size, **fake):
    return FakeBackend(
        EngineSettings(model="m", backend="fake", fake=FakeSettings(bytes=size, **fake)), sleep=lambda _: None
    )


def start_holding(nvml, gpu, size):
    """Another process that takes ``size`` bytes, says a line if it got them, and then waits to be told to end."""
    code = (
        f"from slimproc.engines.fake.memory import FakeMemory; FakeMemory().hold({size}); print(1, flush=True); input()"
    )
    package = str(Path(slimproc.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **nvml.environ, "PYTHONPATH": package, "CUDA_VISIBLE_DEVICES": gpu.uuid},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def holding(nvml, gpu, size):
    process = start_holding(nvml, gpu, size)
    assert process.stdout.readline()
    return process


def test_a_load_takes_its_bytes_little_by_little_and_an_unload_gives_them_back(gpu, environ):
    seen = []
    engine = backend(4 * GIB, load_time=0.2)
    engine.load(lambda fraction: seen.append((fraction, gpu.allocated()[os.getpid()])))
    assert seen == [(part / 4, part * GIB) for part in (1, 2, 3, 4)]
    engine.close()
    assert gpu.allocated() == {}


def test_what_does_not_fit_fails_as_cuda_does_and_may_be_tried_again(gpu, environ):
    gpu.other(5 * GIB)
    with pytest.raises(LoadFailed, match=rf"out of memory: {4 * GIB} bytes do not fit {gpu.uuid}") as caught:
        backend(4 * GIB).load(lambda _: None)
    assert not caught.value.permanent
    gpu.other(4 * GIB)
    backend(4 * GIB).load(lambda _: None)
    assert gpu.allocated() == {os.getpid(): 4 * GIB}


def test_reserved_bytes_and_those_of_other_processes_are_not_free(nvml, environ, gpu):
    small = nvml.add_gpu(total=4 * GIB, reserved=GIB)
    small.allocate(os.getppid(), GIB)
    small.allocate(os.getppid(), GIB, graphics=True)
    memory.FakeMemory({**nvml.environ, "CUDA_VISIBLE_DEVICES": small.uuid}).hold(GIB)
    with pytest.raises(LoadFailed, match=f"{GIB} are free"):
        memory.FakeMemory({**nvml.environ, "CUDA_VISIBLE_DEVICES": small.uuid}).hold(GIB + 1)


def test_who_is_killed_gives_back_what_he_held(nvml, gpu, environ):
    with holding(nvml, gpu, 6 * GIB) as process:
        with pytest.raises(LoadFailed):
            backend(4 * GIB).load(lambda _: None)
        process.kill()
        process.wait()
        backend(4 * GIB).load(lambda _: None)


def test_memory_that_lingers_is_in_use_for_the_driver_and_for_the_next_engine(nvml, gpu, environ):
    gpu.linger(3600)
    with holding(nvml, gpu, 6 * GIB) as process:
        process.kill()
    with pytest.raises(LoadFailed):
        backend(4 * GIB).load(lambda _: None)
    with Probe(nvml.environ) as probe:
        assert probe.line().devices[gpu.uuid].free == 2 * GIB
        gpu.linger(0)
        backend(4 * GIB).load(lambda _: None)
        probe.until(lambda line: line.devices[gpu.uuid].free == 4 * GIB, "the driver sees the same")


def test_two_engines_never_get_the_same_bytes(nvml, gpu):
    """Of six processes that want a quarter of the device at once, four get it."""
    processes = [start_holding(nvml, gpu, 2 * GIB) for _ in range(6)]
    got = [bool(process.stdout.readline()) for process in processes]
    assert sum(got) == 4
    for process in processes:
        process.communicate(b"\n")


def test_a_mig_instance_is_a_device_of_its_own(nvml, gpu):
    instance = gpu.add_mig(total=GIB)
    held = memory.FakeMemory({**nvml.environ, "CUDA_VISIBLE_DEVICES": instance.uuid})
    with pytest.raises(LoadFailed):
        held.hold(2 * GIB)
    held.hold(GIB)
    assert instance.allocated() == {os.getpid(): GIB}
    assert gpu.allocated() == {}


def test_a_device_that_is_not_there_or_is_lost_cannot_be_loaded_on(nvml, gpu):
    with pytest.raises(LoadFailed, match="there is no GPU-dddd"):
        memory.FakeMemory({**nvml.environ, "CUDA_VISIBLE_DEVICES": "GPU-dddd"}).hold(1)
    gpu.fail(LOST)
    with pytest.raises(LoadFailed, match="does not answer"):
        memory.FakeMemory({**nvml.environ, "CUDA_VISIBLE_DEVICES": gpu.uuid}).hold(1)


@pytest.mark.parametrize("device", [None, ""])
def test_on_the_host_nothing_is_held(nvml, gpu, device):
    environ = nvml.environ | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device})
    memory.FakeMemory(environ).hold(1 << 50)
    memory.FakeMemory(NVML_OF_NOBODY).hold(1 << 50)
    assert gpu.allocated() == {}
