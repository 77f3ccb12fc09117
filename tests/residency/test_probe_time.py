"""What a probe does as minutes pass: on a clock that only the test moves, in a process that has loaded the stand-in driver."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import slimproc
from tests.standin_nvml import GIB, StandInNvml

ROOT = Path(slimproc.__file__).parents[1]
MINUTE = """
import sys
from pathlib import Path
from slimproc.residency.probes.nvml import Gpus, NeedsNewProcess
from slimproc.residency.probes.processes import Trees
from slimproc.residency.views import DeviceSample
from tests.standin_nvml import GIB, LOST, MISMATCH, NO_DRIVER, UNKNOWN, StandInGpu

nvml = Path(sys.argv[1])
host = DeviceSample("host", "host memory", 64 * GIB, 32 * GIB)
now = 0.0
gpus = Gpus(clock=lambda: now)

def look(seconds=0.25):
    global now
    now += seconds
    return gpus.sample(Trees(), host)

def knob(file, value):
    (nvml / file).write_text(str(value))

def ends(seconds):
    try:
        look(seconds)
    except NeedsNewProcess:
        return True
    return False
"""


@pytest.fixture
def minutes(tmp_path):
    nvml = StandInNvml(tmp_path / "nvml")
    nvml.add_gpu(total=8 * GIB, uuid="GPU-a")

    def run(code):
        done = subprocess.run(
            [sys.executable, "-c", MINUTE + code, str(nvml.directory)],
            env={**os.environ, **nvml.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    return run


def test_a_driver_that_comes_later_is_found_within_a_minute(minutes):
    minutes("""
knob("init", NO_DRIVER)
assert look().driver == "absent"
knob("init", 0)
assert look(59).driver == "absent"
assert look(1).driver == ""
assert list(look().devices) == ["GPU-a"]
""")


def test_without_a_driver_a_probe_need_not_be_started_anew(minutes):
    minutes("""
knob("init", NO_DRIVER)
for _ in range(100):
    assert look(60).driver == "absent"
""")


def test_a_mig_instance_that_is_made_later_is_found_within_a_minute(minutes):
    minutes("""
knob("gpu0/mig", 1)
assert look().devices == {}
StandInGpu(nvml / "gpu0/mig0", "MIG-1", total=GIB, name="M")
assert list(look(60).devices) == ["MIG-1"]
""")


def test_a_minute_after_a_gpu_was_lost_another_process_is_to_look(minutes):
    minutes("""
look()
knob("gpu0/fail", LOST)
assert look().devices["GPU-a"].fault == "lost"
assert not ends(59)
assert ends(1)
""")


def test_a_gpu_that_was_lost_stays_so_when_new_devices_are_looked_for(minutes):
    minutes("""
look()
look(30)
knob("gpu0/fail", LOST)
assert look().devices["GPU-a"].fault == "lost"
knob("gpu0/fail", 0)
assert look(35).devices["GPU-a"].fault == "lost"
""")


def test_a_minute_after_a_gpu_did_not_tell_its_name_another_process_is_to_look(minutes):
    minutes("""
knob("gpu0/fail", LOST)
assert look().unnamed == {0: "lost"}
assert not ends(59)
assert ends(1)
""")


def test_a_gpu_that_recovers_needs_no_other_process(minutes):
    minutes("""
look()
knob("gpu0/fail", UNKNOWN)
assert look().devices["GPU-a"].fault
knob("gpu0/fail", 0)
assert not look(59).devices["GPU-a"].fault
assert not ends(60)
knob("gpu0/fail", UNKNOWN)
assert not ends(0.25)
assert not ends(59)
assert ends(1)
""")


def test_a_driver_with_a_fault_is_left_to_another_process_after_a_minute(minutes):
    minutes("""
knob("init", UNKNOWN)
assert look().driver.startswith("unknown: ")
assert not ends(59)
assert ends(1)
""")


def test_a_mismatch_that_begins_later_ends_the_process_at_once_so_that_a_new_one_can_look(minutes):
    minutes("""
look()
knob("gpu0/fail", MISMATCH)
assert ends(0.25)
""")


def test_what_another_process_found_out_is_forgotten_once_the_driver_works(minutes):
    minutes("""
gpus = Gpus(anew=True, clock=lambda: now)
knob("init", MISMATCH)
assert look().driver == "driver_mismatch"
assert ends(60)
gpus = Gpus(anew=True, clock=lambda: now)
knob("init", 0)
assert look().driver == ""
knob("gpu0/fail", MISMATCH)
assert ends(0.25)
""")


def test_a_name_that_is_none_is_not_believed(minutes):
    minutes("""
for name in (b"\\xff\\xfe", b"GPU\\x07", b""):
    (nvml / "gpu0/uuid").write_bytes(name)
    gpus = Gpus(clock=lambda: now)
    assert look().devices == {}
    assert list(look().unnamed) == [0]
""")


def test_a_process_that_is_said_to_have_more_than_there_is_makes_all_of_them_doubtful(minutes):
    minutes("""
import os
leader = os.getsid(0)
(nvml / f"gpu0/alloc/{os.getpid()}").write_text(str(9 * GIB))
trees = Trees(frozenset([leader]))
assert gpus.sample(trees, host).devices["GPU-a"].attributed is None
(nvml / f"gpu0/alloc/{os.getpid()}").write_text(str(GIB))
assert gpus.sample(trees, host).devices["GPU-a"].attributed == {leader: GIB}
assert gpus.sample(Trees(), host).devices["GPU-a"].attributed == {}
""")


def test_a_process_that_has_just_ended_makes_nobody_doubtful(minutes):
    minutes("""
import os
(nvml / f"gpu0/alloc/{os.getpid()}").write_text(str(GIB))
knob("gpu0/shift_pids", 1 << 23)  # a number that nobody has
assert look().devices["GPU-a"].attributed == {}
assert look().devices["GPU-a"].attributed is None
""")
