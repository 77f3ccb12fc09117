"""What the probe makes of a driver in every state it may be in: the real pynvml on the stand-in library."""

from __future__ import annotations

import os

import pytest
from probing import Holder, Probe

from tests.standin_nvml import (
    GIB,
    LOST,
    MISMATCH,
    NO_DRIVER,
    NO_PERMISSION,
    NOT_SUPPORTED,
    UNKNOWN,
    StandInNvml,
)

ANEW = 3


@pytest.fixture
def nvml(tmp_path):
    return StandInNvml(tmp_path / "nvml")


@pytest.fixture
def gpu(nvml):
    return nvml.add_gpu(total=24 * GIB, name="Stand-in 24")


@pytest.fixture
def probe(nvml, gpu):
    with Probe(nvml.environ) as probe:
        yield probe


@pytest.fixture
def holder():
    with Holder() as holder:
        yield holder


# --- a driver that works --------------------------------------------------------------------------------------


def test_gpus_are_named_by_uuid_and_numbered_as_on_the_bus(nvml):
    first, second = nvml.add_gpu(uuid="GPU-ffff"), nvml.add_gpu(uuid="GPU-0000", total=8 * GIB, name="small")
    with Probe(nvml.environ) as probe:
        line = probe.line()
    assert list(line.devices) == ["host", first.uuid, second.uuid]
    assert [line.devices[gpu.uuid].index for gpu in nvml.gpus] == [0, 1]
    small = line.devices[second.uuid]
    assert (small.kind, small.name, small.total, small.free, small.fault) == ("gpu", "small", 8 * GIB, 8 * GIB, "")
    assert line.driver == ""


def test_free_is_what_the_driver_calls_free_so_that_reserved_bytes_are_not_in_it(nvml, gpu):
    gpu.other(4 * GIB)
    reserving = nvml.add_gpu(total=24 * GIB, reserved=GIB)
    with Probe(nvml.environ) as probe:
        devices = probe.line().devices
    assert devices[gpu.uuid].free == 20 * GIB
    assert devices[reserving.uuid].free == 23 * GIB


def test_bytes_of_a_whole_process_group_are_its_leaders(probe, gpu, holder):
    gpu.allocate(holder.leader, GIB)
    gpu.allocate(holder.child, 2 * GIB)
    gpu.allocate(os.getpid(), 4 * GIB)
    probe.watch(holder.leader)
    line = probe.until(lambda line: line.devices[gpu.uuid].attributed, "the group has bytes")
    assert line.devices[gpu.uuid].attributed == {holder.leader: 3 * GIB}
    assert line.devices[gpu.uuid].free == 17 * GIB


def test_a_process_that_draws_and_computes_is_counted_once(probe, gpu, holder):
    gpu.allocate(holder.leader, GIB, graphics=True)
    gpu.allocate(holder.child, GIB)
    probe.watch(holder.leader)
    line = probe.until(lambda line: line.devices[gpu.uuid].attributed, "the group has bytes")
    assert line.devices[gpu.uuid].attributed == {holder.leader: 2 * GIB}


def test_bytes_of_the_dead_are_nobodys_and_may_be_in_use_for_a_while(probe, gpu):
    with Holder() as holder:
        gpu.linger(3600)
        gpu.allocate(holder.child, 2 * GIB)
        probe.watch(holder.leader)
        probe.until(lambda line: line.devices[gpu.uuid].attributed, "the group has bytes")
    line = probe.until(lambda line: not line.devices[gpu.uuid].attributed, "they are not attributed any more")
    assert line.devices[gpu.uuid].free == 22 * GIB
    gpu.linger(0)
    probe.until(lambda line: line.devices[gpu.uuid].free == 24 * GIB, "they are free")


def test_mig_instances_are_devices_and_the_gpu_they_are_made_of_is_none(nvml, holder):
    whole, other = nvml.add_gpu(total=40 * GIB), nvml.add_gpu()
    slices = [whole.add_mig(total=20 * GIB), whole.add_mig(total=10 * GIB)]
    slices[1].allocate(holder.child, 3 * GIB)
    with Probe(nvml.environ) as probe:
        probe.watch(holder.leader)
        line = probe.until(lambda line: line.devices[slices[1].uuid].attributed, "the group has bytes")
    assert list(line.devices) == ["host", slices[0].uuid, slices[1].uuid, other.uuid]
    assert [line.devices[gpu.uuid].index for gpu in (*slices, other)] == [0, 0, 1]
    assert line.devices[slices[0].uuid].free == 20 * GIB
    assert line.devices[slices[1].uuid].free == 7 * GIB
    assert line.devices[slices[1].uuid].attributed == {holder.leader: 3 * GIB}


# --- no driver, or one that does not fit ----------------------------------------------------------------------


def test_without_the_library_there_is_the_host_and_no_word_of_complaint(tmp_path):
    with Probe({"LD_LIBRARY_PATH": str(tmp_path)}) as probe:
        line = probe.line()
        assert (list(line.devices), line.driver) == (["host"], "absent")
        probe.process.stdin.close()
        probe.process.stdin = None
        assert probe.exit() == (0, "")


def test_without_a_loaded_driver_there_is_the_host(nvml, gpu):
    nvml.fail_init(NO_DRIVER)
    with Probe(nvml.environ) as probe:
        line = probe.line()
    assert (list(line.devices), line.driver) == (["host"], "absent")


def test_after_a_driver_was_replaced_the_probe_ends_to_be_started_anew(nvml, gpu):
    nvml.fail_init(MISMATCH)
    with Probe(nvml.environ) as probe:
        assert probe.exit() == (ANEW, "")


def test_a_new_probe_that_finds_the_driver_mismatched_says_so_and_stays(nvml, gpu):
    nvml.fail_init(MISMATCH)
    with Probe(nvml.environ, anew=True) as probe:
        lines = [probe.line(), probe.line()]
    assert [(list(line.devices), line.driver) for line in lines] == [(["host"], "driver_mismatch")] * 2


def test_an_unknown_error_of_the_driver_is_a_fault_and_not_the_absence_of_gpus(nvml, gpu):
    nvml.fail_init(UNKNOWN)
    with Probe(nvml.environ) as probe:
        line = probe.line()
    assert list(line.devices) == ["host"]
    assert line.driver.startswith("unknown: ")


def test_a_driver_that_is_too_old_to_list_processes_still_says_what_is_free(tmp_path, holder):
    nvml = StandInNvml(tmp_path / "old", old_driver=True)
    gpu = nvml.add_gpu(total=8 * GIB)
    gpu.allocate(holder.leader, GIB)
    with Probe(nvml.environ) as probe:
        seen = probe.line().devices[gpu.uuid]
    assert (seen.free, seen.attributed, seen.fault) == (7 * GIB, None, "")


# --- a GPU that fails -----------------------------------------------------------------------------------------


def test_a_lost_gpu_is_lost_for_this_probe_whatever_the_driver_says_later(probe, nvml, gpu):
    assert probe.line().devices[gpu.uuid].fault == ""
    gpu.fail(LOST)
    line = probe.until(lambda line: line.devices[gpu.uuid].fault, "it is lost")
    assert (line.devices[gpu.uuid].fault, line.devices[gpu.uuid].free) == ("lost", 0)
    assert line.devices[gpu.uuid].attributed is None
    gpu.fail(0)
    assert [probe.line().devices[gpu.uuid].fault for _ in range(3)] == ["lost"] * 3
    with Probe(nvml.environ) as another:
        assert another.line().devices[gpu.uuid].fault == ""


def test_a_gpu_that_is_lost_before_it_told_its_name_is_known_by_its_number(nvml):
    nvml.add_gpu()
    good = nvml.add_gpu()
    nvml.gpus[0].fail(LOST)
    with Probe(nvml.environ) as probe:
        line = probe.line()
    assert line.unnamed == {0: "lost"}
    assert list(line.devices) == ["host", good.uuid]
    assert line.devices[good.uuid].fault == ""


def test_other_gpus_have_nothing_to_do_with_one_that_fails(nvml, gpu):
    good = nvml.add_gpu()
    with Probe(nvml.environ) as probe:
        probe.line()
        gpu.fail(LOST)
        line = probe.until(lambda line: line.devices[gpu.uuid].fault, "it is lost")
        assert line.devices[good.uuid].fault == ""
        assert line.devices[good.uuid].free == good.total


@pytest.mark.parametrize("code", [UNKNOWN, NO_PERMISSION])
def test_memory_that_cannot_be_read_is_a_fault_until_it_can(probe, gpu, code):
    gpu.fail_memory(code)
    line = probe.until(lambda line: line.devices[gpu.uuid].fault, "it has a fault")
    assert line.devices[gpu.uuid].fault.startswith("unknown: ")
    assert line.devices[gpu.uuid].free == 0
    gpu.fail_memory(0)
    line = probe.until(lambda line: not line.devices[gpu.uuid].fault, "it is well")
    assert line.devices[gpu.uuid].free == 24 * GIB


def test_a_gpu_without_memory_of_its_own_has_the_hosts(probe, gpu):
    gpu.fail_memory(NOT_SUPPORTED)
    line = probe.until(lambda line: line.devices[gpu.uuid].kind == "unified", "it says so")
    host, unified = line.devices["host"], line.devices[gpu.uuid]
    assert (unified.total, unified.free, unified.fault) == (host.total, host.free, "")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("NVIDIA GB10", "unified"), ("Orin (nvgpu)", "unified"), ("NVIDIA Thor", "unified"), ("NVIDIA GB100", "gpu")],
)
def test_a_gpu_with_the_hosts_memory_that_tells_numbers_is_known_by_its_name_and_the_smaller_counts(nvml, name, kind):
    little, much = nvml.add_gpu(total=64 << 20, name=name), nvml.add_gpu(total=1 << 50, name=name)
    little.other(16 << 20)
    with Probe(nvml.environ) as probe:
        line = probe.line()
    host = line.devices["host"]
    seen = {device: (line.devices[device].kind, line.devices[device].free) for device in (little.uuid, much.uuid)}
    if kind == "unified":
        assert seen == {little.uuid: (kind, 48 << 20), much.uuid: (kind, host.free)}
    else:
        assert seen == {little.uuid: (kind, 48 << 20), much.uuid: (kind, 1 << 50)}


def test_what_a_gpu_has_may_change_and_the_newest_number_counts(probe, gpu):
    assert probe.line().devices[gpu.uuid].total == 24 * GIB
    gpu.resize(12 * GIB)
    line = probe.until(lambda line: line.devices[gpu.uuid].total == 12 * GIB, "it is smaller")
    assert line.devices[gpu.uuid].free == 12 * GIB


@pytest.mark.parametrize("code", [NO_PERMISSION, NOT_SUPPORTED])
def test_where_processes_may_not_be_listed_nobodys_bytes_are_known(probe, gpu, holder, code):
    gpu.allocate(holder.leader, GIB)
    gpu.fail_processes(code)
    probe.watch(holder.leader)
    line = probe.until(lambda line: line.devices[gpu.uuid].attributed is None, "it says so")
    assert (line.devices[gpu.uuid].free, line.devices[gpu.uuid].fault) == (23 * GIB, "")


def test_where_bytes_are_not_told_nobodys_are_known(probe, gpu, holder):
    gpu.allocate(holder.leader, GIB)
    gpu.hide_bytes()
    probe.watch(holder.leader)
    probe.until(lambda line: line.devices[gpu.uuid].attributed is None, "it says so")


def test_an_empty_list_of_processes_says_that_nobody_has_anything(probe, gpu, holder):
    gpu.allocate(holder.leader, GIB)
    gpu.hide_processes()
    probe.watch(holder.leader)
    line = probe.until(lambda line: line.devices["host"].attributed, "it watches")
    assert line.devices[gpu.uuid].attributed == {}


def test_the_numbers_of_another_namespace_tell_nobody_whose_the_bytes_are(probe, gpu, holder):
    gpu.allocate(holder.leader, GIB)
    gpu.shift_pids(1 << 23)
    probe.watch(holder.leader)
    line = probe.until(lambda line: line.devices[gpu.uuid].attributed is None, "it says so")
    assert line.devices[gpu.uuid].free == 23 * GIB
