"""How models and devices look to those who ask: states, memory, readiness, and an operator's wishes."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from slimproc.errors import DeadlineExceeded, InsufficientMemory, ModelFailed
from slimproc.http import lifecycle
from slimproc.http.health import _readiness
from slimproc.http.openai.models import describe_device, rfc3339
from slimproc.http.status import describe_status
from slimproc.replicas.life import Sighting
from slimproc.replicas.states import ReplicaState
from slimproc.residency.views import DeviceReport, Explanation
from tests.fakes import FakeReplica, looped

S = ReplicaState


class Seen(FakeReplica):
    """A replica with the rest of what the routes look at."""

    def __init__(self, state: ReplicaState, reason: str = "", sighting: Sighting | None = None) -> None:
        super().__init__()
        self.sighting = sighting
        self.unload_failed = self.remains = ""
        self.resident_since = 0.0
        self.life = object() if state is S.READY else None
        self.short_of_memory = False
        self.become(state, reason)

    def statistics(self) -> Any:
        return type("Statistics", (), {"progress": 0.5})


def remote(state: Any, residency: Any = None, **fields: Any) -> Sighting:
    return Sighting(state, residency, asked=True, **fields)


@pytest.mark.parametrize(
    ("replicas", "value", "state", "ready", "residency"),
    [
        ([Seen(S.READY)], "loaded", "ready", True, "resident"),
        ([Seen(S.DRAINING)], "loaded", "unloading", False, "resident"),
        ([Seen(S.STARTING)], "loading", "loading", False, "not_resident"),
        ([Seen(S.BACKOFF, "no")], "loading", "loading", False, "not_resident"),
        ([Seen(S.STOPPING)], "unloaded", "unloading", False, "resident"),
        ([Seen(S.FAILED, "no")], "failed", "failed", False, "not_resident"),
        ([Seen(S.STOPPED)], "unloaded", "unloaded", False, "not_resident"),
        ([Seen(S.FAILED, "no"), Seen(S.READY)], "loaded", "ready", True, "resident"),
        ([Seen(S.STOPPED, sighting=remote("unknown"))], "unloaded", "unknown", None, None),
        ([Seen(S.STOPPED, sighting=remote("unknown", "not_resident"))], "unloaded", "unknown", None, None),
        ([Seen(S.STOPPED, sighting=remote("unloaded", "not_resident"))], "unloaded", "unloaded", False, "not_resident"),
        ([Seen(S.READY, sighting=remote("ready", "resident"))], "loaded", "ready", True, "resident"),
        ([Seen(S.STOPPING, sighting=remote("failed", "unknown"))], "unloaded", "unloading", False, None),
    ],
)
def test_a_models_status_says_what_is_known_of_it(replicas, value, state, ready, residency):
    found = describe_status(replicas, 5)
    assert (found["value"], found["state"], found["ready"], found["residency"]) == (value, state, ready, residency)
    assert found["reserved_bytes"] == 5
    sighting = replicas[0].sighting
    assert found["remote_state"] == (sighting.state if sighting else None)


def test_reasons_are_told_without_directories():
    found = describe_status([Seen(S.FAILED, "no such file: /srv/models/x.gguf\nTraceback")], 0)
    assert found["reason"] == "no such file: x.gguf"
    assert found["last_error"] == {"code": "engine_crashed", "message": "no such file: x.gguf"}
    told = describe_status([Seen(S.STOPPED, sighting=remote("failed", last_error=("OOM", "too big")))], 0)
    assert told["last_error"] == {"code": "OOM", "message": "too big"}


def test_a_device_was_observed_at_an_instant_in_nanoseconds():
    assert rfc3339(1_790_812_800_000_000_000) == "2026-10-01T00:00:00.000000000Z"
    assert rfc3339(1_790_812_800_000_000_007).endswith(".000000007Z")
    report = DeviceReport("GPU-1", "gpu", "A card", total=10, free=4, taken=time.monotonic() - 5, fresh=False)
    found = describe_device(report)
    assert (found["id"], found["name"], found["total"], found["free"], found["fresh"]) == (
        "GPU-1",
        "A card",
        10,
        4,
        False,
    )
    assert found["observed_at"] < rfc3339(time.time_ns() - 4 * 10**9)


class Memory:
    """A residency that a test scripts."""

    def __init__(self, *, preloading: bool = False, verdict: Any = "load", obstacle: str = "") -> None:
        self.is_preloading, self.verdict, self.in_the_way = preloading, verdict, obstacle
        self.wishes: list[str] = []

    def preloading(self, model: str) -> bool:
        return self.is_preloading

    def obstacle(self, model: str) -> str:
        return self.in_the_way

    def explain(self, model: str) -> Explanation:
        code = "insufficient_memory" if self.verdict == "refuse" else None
        return Explanation(model, self.verdict, "it says so", needed=7, code=code)

    def load(self, model: str) -> None:
        self.wishes.append("load")

    def unload(self, model: str) -> None:
        self.wishes.append("unload")


class Model:
    name = "m"
    managed = True
    prepare_timeout = load_timeout = unload_timeout = 0.1


def gateway(memory: Memory, *replicas: FakeReplica) -> Any:
    class Supervisor:
        def of(self, _: str) -> list[FakeReplica]:
            return list(replicas)

    config = type("Config", (), {"drain_timeout": 0.1})
    admission = SimpleNamespace(suspects=SimpleNamespace(clear=lambda _: None))
    parts = {"residency": memory, "supervisor": Supervisor(), "config": config, "admission": admission}
    return type("Gateway", (), parts)


@pytest.mark.parametrize(
    ("replica", "preloading", "ready"),
    [
        (Seen(S.READY), False, True),
        (Seen(S.DRAINING), False, True),
        (Seen(S.STOPPED), False, True),  # evicted: it is loaded when somebody asks
        (Seen(S.STARTING), False, True),
        (Seen(S.STOPPING), False, True),
        (Seen(S.STOPPED), True, False),  # it is to be there from the start
        (Seen(S.STARTING), True, False),
        (Seen(S.STARTING, "it died"), False, False),
        (Seen(S.BACKOFF, "it died"), False, False),
        (Seen(S.KILLING, "it stalled"), False, False),
        (Seen(S.FAILED, "no such file"), False, False),
    ],
)
def test_a_model_is_ready_that_serves_or_will_when_it_is_asked_for(replica, preloading, ready):
    found = _readiness(gateway(Memory(preloading=preloading), replica), "m")
    assert found["ready"] is ready


@pytest.mark.parametrize(("state", "reason"), [(S.STOPPING, ""), (S.KILLING, "it stalled")])
def test_a_model_that_cannot_be_unloaded_is_not_ready_and_says_so_before_all_else(state, reason):
    replica = Seen(state, reason)
    replica.unload_failed = "process 7 does not end"
    found = _readiness(gateway(Memory(), replica), "m")
    assert (found["ready"], found["reason"]) == (False, "process 7 does not end")
    assert describe_status([replica], 5)["reason"] == "process 7 does not end"


@pytest.mark.parametrize(("state", "ready"), [(S.READY, True), (S.STOPPED, False), (S.STARTING, False)])
def test_where_no_device_is_of_any_use_only_what_is_in_memory_is_ready(state, ready):
    found = _readiness(gateway(Memory(obstacle="the driver does not answer"), Seen(state)), "m")
    assert found["ready"] is ready
    assert (found["status"], found.get("reason")) == (
        ("ready", None) if ready else ("failed", "the driver does not answer")
    )


@looped
async def test_an_operator_waits_until_the_model_is_there(monkeypatch):
    monkeypatch.setattr(lifecycle, "_SPARE", 0.0)
    memory = Memory()
    assert await lifecycle.load(gateway(memory, Seen(S.READY)), Model) == "loaded"
    assert await lifecycle.unload(gateway(memory, Seen(S.STOPPED)), Model) == "unloaded"
    assert memory.wishes == ["load", "unload"]
    with pytest.raises(DeadlineExceeded, match="still not loaded"):
        await lifecycle.load(gateway(memory, Seen(S.STARTING)), Model)
    with pytest.raises(DeadlineExceeded, match="still not unloaded"):
        await lifecycle.unload(gateway(memory, Seen(S.READY)), Model)


@looped
async def test_an_operator_is_told_why_it_cannot_be_there(monkeypatch):
    monkeypatch.setattr(lifecycle, "_SPARE", 0.0)
    failing = Seen(S.FAILED, "no such file")
    failing.changed_at = time.monotonic() + 60
    with pytest.raises(ModelFailed, match="no such file"):
        await lifecycle.load(gateway(Memory(), failing), Model)
    with pytest.raises(InsufficientMemory) as caught:
        await lifecycle.load(gateway(Memory(verdict="refuse"), Seen(S.STOPPED)), Model)
    assert caught.value.plan is not None
    assert caught.value.plan["needed"] == 7


@looped
async def test_an_old_failure_is_not_taken_for_this_ones(monkeypatch):
    monkeypatch.setattr(lifecycle, "_SPARE", 0.0)
    with pytest.raises(DeadlineExceeded):
        await lifecycle.load(gateway(Memory(), Seen(S.FAILED, "an hour ago")), Model)
