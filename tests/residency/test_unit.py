"""How a replica looks to planning: its state, and what it was asked and has not done yet."""

from types import SimpleNamespace
from unittest import mock

import pytest

from slimproc.replicas.restart import RETRY_AFTER
from slimproc.replicas.states import ReplicaState
from slimproc.residency.unit import Unit
from slimproc.residency.views import Claim, Phase

STATE, PHASE = ReplicaState, Phase


def make(state, *, remains="", asked="", changed_at=0.0, renewed=False, stuck=""):
    replica = SimpleNamespace(
        name="m/0", state=state, remains=remains, changed_at=changed_at, occupied=1, resident_since=1.0, idle_since=2.0,
        reason="it died", unload_failed=stuck, sighting=None, renewed=renewed, stuck=stuck,
    )  # fmt: skip
    config = SimpleNamespace(name="m", pin=False, min_resident=0.0, ttl=None)
    unit = Unit(replica, config, lambda: Claim(5, 4))  # type: ignore[arg-type]
    unit.asked = asked
    return unit


@pytest.mark.parametrize(
    ("state", "asked", "phase"),
    [
        (STATE.STOPPED, "", PHASE.ABSENT),
        (STATE.STOPPED, "start", PHASE.LOADING),
        (STATE.STOPPED, "stop", PHASE.ABSENT),
        (STATE.STARTING, "", PHASE.LOADING),
        (STATE.STARTING, "stop", PHASE.DRAINING),
        (STATE.READY, "", PHASE.RESIDENT),
        (STATE.READY, "stop", PHASE.DRAINING),
        (STATE.DRAINING, "abandon", PHASE.RESIDENT),
        (STATE.STOPPING, "abandon", PHASE.LEAVING),
        (STATE.KILLING, "", PHASE.LOADING),
        (STATE.BACKOFF, "", PHASE.LOADING),
    ],
)
def test_what_was_asked_counts_as_done_where_it_can_still_be_heard(state, asked, phase):
    assert make(state, asked=asked).phase is phase


def test_what_failed_may_be_tried_again_after_a_minute_or_when_an_operator_forgives_it():
    unit = make(STATE.FAILED, changed_at=100.0)
    with mock.patch("time.monotonic", return_value=99.0 + RETRY_AFTER):
        assert unit.phase is PHASE.FAILED
        unit.forgiven = True
        assert unit.phase is PHASE.ABSENT
        unit.forgiven = False
    with mock.patch("time.monotonic", return_value=100.0 + RETRY_AFTER):
        assert unit.phase is PHASE.ABSENT


def test_what_failed_may_be_tried_again_when_its_file_is_another():
    assert make(STATE.FAILED, changed_at=1e12, renewed=True).phase is PHASE.ABSENT


def test_a_server_that_may_still_have_its_model_is_unknown_and_nowhere_but_where_it_was():
    unit = make(STATE.STOPPED, remains="its server is unknown")
    unit.devices = ("GPU-0", "GPU-1")
    assert (unit.view(0, 0).phase, unit.view(0, 0).devices) == (PHASE.UNKNOWN, ("GPU-0", "GPU-1"))
    unit.device = "GPU-1"
    assert unit.view(5, 0).devices == ("GPU-1",)


@pytest.mark.parametrize("state", [STATE.KILLING, STATE.STOPPING])
def test_what_nothing_can_end_is_leaving_for_ever_and_says_why(state):
    seen = make(state, stuck="process 7 does not end").view(5, 0)
    assert (seen.phase, seen.killed, seen.note) == (PHASE.LEAVING, True, "process 7 does not end")
    assert not make(state).view(5, 0).killed


def test_only_who_backs_off_is_retired():
    assert make(STATE.BACKOFF).view(5, 0).backing_off
    assert not make(STATE.STARTING).view(5, 0).backing_off
