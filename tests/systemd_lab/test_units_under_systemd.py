"""The shipped units under a real systemd: what starts them, what they may do, and what happens when they fail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from slimproc.errors import EX_CONFIG
from tests.serving import fake, wait_until
from tests.systemd_lab.lab import PLANTED, ROOT, Lab, Unavailable

pytestmark = pytest.mark.slow

CONFIG = "/etc/slimproc/slimproc.yaml"
SITECUSTOMIZE = """
import os, signal, sys, time
def hang(*_):
    time.sleep(600)
if "serve" in sys.argv:
    signal.signal(signal.SIGUSR1, hang)
if os.environ.get("LAB_HANG") and "serve" in sys.argv:
    hang()
"""
"""The front can be made to hang, as a loop does that something blocks."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Lab]:
    try:
        booted = Lab(tmp_path_factory.mktemp("lab"))
    except Unavailable as reason:
        message = f"NOT TESTED: the units under systemd, since {reason}"
        capture = request.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            print(f"\n{message}")
        pytest.skip(message)
    with booted:
        booted.write(f"{PLANTED}/sitecustomize.py", SITECUSTOMIZE)
        for unit in ("slimproc.service", "slimproc.socket"):
            booted.write(f"/run/systemd/system/{unit}", (ROOT / "systemd" / unit).read_text())
        yield booted


class Service:
    """The service, stopped, with a configuration and settings of this test's own."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.configure()
        self.override()

    def configure(self, **settings: Any) -> None:
        """Keywords are the fake's, or the model's."""
        self.lab.write(CONFIG, yaml.safe_dump(fake(**settings)))

    def override(self, **lines: str) -> None:
        """A drop-in: what ``systemctl edit`` would make."""
        wanted = {"WatchdogSec": "2", **lines}
        text = "\n".join(f"{key}={value}" for key, value in wanted.items())
        self.lab.write("/run/systemd/system/slimproc.service.d/lab.conf", f"[Service]\n{text}\n")
        self.lab.run("systemctl", "daemon-reload")

    def start(self) -> None:
        self.lab.run("systemctl", "start", "slimproc.socket", "slimproc.service")

    @property
    def front(self) -> int:
        return int(self.lab.show("MainPID"))

    def engine(self) -> int:
        wait_until(lambda: self.lab.get("/readyz") == 200, "the model is ready")
        return self.lab.replicas()[0]["pid"]


@pytest.fixture
def service(lab: Lab) -> Iterator[Service]:
    yield Service(lab)
    lab.run("systemctl", "stop", "slimproc.socket", "slimproc.service")
    lab.run("systemctl", "reset-failed")


def test_the_first_request_starts_the_service_and_is_answered(lab, service):
    lab.run("systemctl", "start", "slimproc.socket")
    assert lab.show("ActiveState") == "inactive"
    assert lab.get() == 200
    assert lab.show("ActiveState") == "active"
    assert lab.show("StatusText").startswith("serving at http://127.0.0.1:8000, ")


def test_it_is_ready_before_its_models_and_the_watchdog_lives_through_their_loading(lab, service):
    service.configure(load_time=5)
    service.start()
    assert lab.get("/readyz") == 503
    wait_until(lambda: lab.get("/readyz") == 200, "the model is ready")
    assert (lab.show("NRestarts"), lab.show("ActiveState")) == ("0", "active")


def test_it_runs_without_privileges_as_a_user_of_its_own(lab, service):
    service.start()
    status = lab.status_of(service.front)
    assert {status[name] for name in ("CapBnd", "CapEff", "CapPrm", "CapInh", "CapAmb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert int(status["Uid"].split()[0]) >= 61184, "systemd's range for dynamic users"


def test_its_engines_confine_themselves_within_the_units_limits(lab, service):
    service.start()
    engine = service.engine()
    assert lab.replicas()[0]["details"]["confinement"] == "strict"
    filters = [int(lab.status_of(pid)["Seccomp_filters"]) for pid in (service.front, engine)]
    assert filters[1] == filters[0] + 1


def test_the_kernel_would_rather_end_an_engine_than_the_front(lab, service):
    service.start()
    engine, front = service.engine(), service.front
    scores = [int(lab.run("cat", f"/proc/{pid}/oom_score_adj")) for pid in (engine, front)]
    assert scores[0] == 500
    assert scores[1] <= 0  # -300, where systemd itself may lower it


def test_a_configuration_that_only_root_may_read_comes_in_as_a_credential(lab, service):
    lab.run("chmod", "600", CONFIG)
    lab.run("systemctl", "start", "slimproc.service", check=False)
    assert lab.show("ExecMainStatus") == str(EX_CONFIG), "it cannot read it"
    service.override(
        LoadCredential=f"slimproc.yaml:{CONFIG}",
        ExecStart="\nExecStart=/opt/slimproc/bin/slimproc serve --config %d/slimproc.yaml",
    )
    lab.run("systemctl", "reset-failed")
    service.start()
    assert lab.get() == 200
    lab.run("rm", CONFIG)


def test_its_shared_memory_is_its_own(lab, service):
    service.start()
    lab.run("sh", "-c", "mkdir -p /dev/shm && touch /dev/shm/of-the-machine")
    inside = lab.run("ls", f"/proc/{service.front}/root/dev/shm")
    assert "of-the-machine" not in inside


def test_what_it_keeps_is_readable_by_nobody_else(lab, service):
    service.start()
    assert lab.run("stat", "-c", "%a", "/var/lib/private/slimproc").strip() == "700"
    assert lab.run("stat", "-c", "%a", "/run/slimproc/admin.sock").strip() == "600"


def test_after_a_kill_the_next_request_waits_and_is_answered_and_no_engine_is_left(lab, service):
    service.start()
    engine, front = service.engine(), service.front
    lab.run("kill", "-KILL", str(front))
    assert lab.get() == 200
    assert lab.show("NRestarts") == "1"
    assert service.front != front
    wait_until(lambda: not lab.lives(engine), "the engine is gone")


def test_a_front_that_hangs_is_aborted_with_its_stack_in_the_journal_and_started_again(lab, service):
    service.start()
    engine = service.engine()
    lab.run("kill", "-USR1", str(service.front))
    lab.wait("NRestarts", "1")
    assert lab.get() == 200
    journal = lab.journal()
    assert "slimproc.service: Watchdog timeout" in journal
    assert 'sitecustomize.py", line 4 in hang' in journal
    wait_until(lambda: not lab.lives(engine), "the engine is gone")


def test_a_front_that_hangs_in_its_start_is_aborted_too(lab, service):
    service.override(TimeoutStartSec="2", Environment="LAB_HANG=1", TimeoutAbortSec="5")
    lab.run("systemctl", "start", "--no-block", "slimproc.service")
    lab.wait("NRestarts", "1")
    assert "start operation timed out. Aborting" in lab.journal()


def test_stopping_ends_an_engine_that_wants_to_stay_and_counts_as_success(lab, service):
    service.configure(ignore_sigterm=True, hang_in_unload=True)
    service.start()
    engine = service.engine()
    lab.run("systemctl", "stop", "slimproc.socket", "slimproc.service")
    assert (lab.show("Result"), lab.show("ExecMainStatus")) == ("success", "0")
    assert not lab.lives(engine)


def test_a_reload_puts_a_changed_file_in_force_and_keeps_the_engine(lab, service):
    service.start()
    engine, front = service.engine(), service.front
    service.configure(aliases=["nick"])
    lab.run("systemctl", "reload", "slimproc.service")
    wait_until(lambda: "reloaded" in lab.journal(), "it has read its file again")
    lab.wait("ActiveState", "active")
    assert (service.front, service.engine(), lab.show("NRestarts")) == (front, engine, "0")


def test_a_reload_of_a_wrong_file_changes_nothing_and_its_status_says_so(lab, service):
    service.start()
    engine = service.engine()
    lab.write(CONFIG, "models: {}\nlisten: nonsense\n")
    lab.run("systemctl", "reload", "slimproc.service")
    wait_until(lambda: "the last reload was refused: " in lab.show("StatusText"), "its status says so")
    assert lab.show("ActiveState") == "active"
    assert (lab.get(), service.engine()) == (200, engine)


def test_a_wrong_configuration_is_told_and_not_tried_again(lab, service):
    lab.write(CONFIG, "models: {}\nlisten: nonsense\n")
    lab.run("systemctl", "start", "slimproc.service", check=False)
    assert (lab.show("ActiveState"), lab.show("ExecMainStatus")) == ("failed", str(EX_CONFIG))
    assert lab.show("NRestarts") == "0"
    assert "listen" in lab.journal()


def test_after_five_deaths_in_five_minutes_it_stays_down_until_it_is_reset(lab, service):
    service.override(ExecStartPre="/bin/false")
    lab.run("systemctl", "start", "slimproc.socket")
    lab.run("systemctl", "start", "--no-block", "slimproc.service")
    lab.wait("Result", "service-start-limit-hit", "slimproc.socket")
    assert lab.show("ActiveState") == "failed"
    assert lab.get() == 0, "refused"
    service.override()
    lab.run("systemctl", "reset-failed")
    service.start()
    assert lab.get() == 200
