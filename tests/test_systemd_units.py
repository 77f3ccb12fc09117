"""The shipped unit files, as systemd's own checks read them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from slimproc.config import Config
from slimproc.errors import EX_CONFIG
from slimproc.server import EXIT_LIMIT

UNITS = Path(__file__).parents[1] / "systemd"
needs_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze (Debian: apt-get install systemd)"
)


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units, with a program to start that is there."""
    for name in ("slimproc.service", "slimproc.socket"):
        text = (UNITS / name).read_text().replace("/opt/slimproc/bin/slimproc", "/bin/true")
        (tmp_path / name).write_text(text)
    return tmp_path


def analyze(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False, cwd=cwd)


@needs_analyze
def test_systemd_has_nothing_to_say_about_the_units(units):
    checked = analyze("verify", "./slimproc.service", "./slimproc.socket", cwd=units)
    # A key that it does not know is no error to it: it is only printed.
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@needs_analyze
def test_what_the_check_prints_is_seen_by_it(units):
    with (units / "slimproc.service").open("a") as unit:
        unit.write("[Service]\nNoSuchKey=1\n")
    assert "NoSuchKey" in analyze("verify", "./slimproc.service", cwd=units).stderr


@needs_analyze
def test_systemd_rates_the_service_as_little_exposed(units):
    rated = analyze("security", "--offline=true", "--threshold=20", "./slimproc.service", cwd=units)
    assert rated.returncode == 0, rated.stdout[-200:]


def settings() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (UNITS / "slimproc.service").read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def test_a_wrong_configuration_is_not_tried_again():
    assert settings()["RestartPreventExitStatus"] == [str(EX_CONFIG)]


def test_a_reload_is_a_hangup_of_the_front_alone():
    assert settings()["ExecReload"] == ["/bin/kill -HUP $MAINPID"]


def test_what_engines_need_is_not_taken_away_by_the_unit():
    """Each of these has broken GPUs, the look at memory, or Landlock; tests cannot see all of it without a GPU."""
    found = settings()
    assert not {"ProcSubset", "PrivateDevices", "MemoryDenyWriteExecute", "PrivateUsers", "PrivateNetwork"} & set(found)
    calls = found["SystemCallFilter"][0].split()
    assert {"landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self", "seccomp"} <= set(calls)
    assert {"char-nvidia* rw", "char-drm rw", "/dev/kfd rw"} <= set(found["DeviceAllow"])


def test_the_service_waits_longer_for_its_end_than_the_server_takes_by_default():
    defaults = dict(
        zip(Config.__struct_fields__[-len(Config.__struct_defaults__) :], Config.__struct_defaults__, strict=True)
    )
    assert float(settings()["TimeoutStopSec"][0]) > defaults["shutdown_timeout"] + 2 * EXIT_LIMIT + 5


def test_the_drivers_modules_are_loaded_before_devices_are_looked_up():
    assert "systemd-modules-load.service" in settings()["After"][0]
    modules = (UNITS / "modules-load.d" / "slimproc.conf").read_text().splitlines()
    assert "nvidia-uvm" in modules
