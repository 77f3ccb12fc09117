"""Worlds for residency: short builders of views, and a simulated machine with a virtual clock that acts as plans say."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from slimproc.residency.ledger import Ledger
from slimproc.residency.plan import plan
from slimproc.residency.views import (
    HOST,
    Abandon,
    Claim,
    Demand,
    DeviceSample,
    DeviceView,
    Evict,
    Expire,
    Load,
    Phase,
    Plan,
    Refuse,
    Sample,
    UnitView,
    World,
)

GPU = "GPU-0"
GPU_1 = "GPU-1"


# --- views ------------------------------------------------------------------------------------------------------------


def device(name=GPU, *, total=100, available=None, margin=0, free=None, kind="gpu", **changes) -> DeviceView:
    """A device that is empty but for what makes ``available`` smaller than its total."""
    available = total - margin if available is None else available
    free = available + margin if free is None else free
    values = {"held": 0, "external": 0, "fresh": True, "recovering": False, **changes}
    return DeviceView(name, kind, total, free, margin, available=available, **values)


def claim(peak, **changes) -> Claim:
    return Claim(**{"load_peak": peak, "run_peak": peak, "source": "measured", **changes})


def unit(name, size=10, phase=Phase.ABSENT, *, model=None, devices=(GPU,), **changes) -> UnitView:
    """A unit whose model has its name; while it has bytes it is on the first of its devices, and has them all."""
    placed = phase not in (Phase.ABSENT, Phase.FAILED, Phase.UNKNOWN)
    values = {
        "claim": claim(size),
        "device": devices[0] if placed else None,
        "hold": size if placed else 0,
        "attributed": size if placed else 0,
        **changes,
    }
    return UnitView(name, model or name, phase, devices=devices, **values)


def resident(name, size=10, **changes) -> UnitView:
    return unit(name, size, Phase.RESIDENT, **changes)


def draining(name, size=10, drained_for=None, **changes) -> UnitView:
    return unit(name, size, Phase.DRAINING, drained_for=drained_for, **changes)


def world(units, demands=(), devices=None, *, now=1000.0, strict=False) -> World:
    """``demands``: names of models, oldest first, or Demands."""
    devices = [device()] if devices is None else devices
    asked = [Demand(each, since=float(place)) if isinstance(each, str) else each for place, each in enumerate(demands)]
    return World(now, {each.device: each for each in devices}, list(units), asked, strict)


def sample(taken, devices=None, **gpu) -> Sample:
    """With ``gpu`` (total, free, attributed …) one GPU; else the given devices."""
    if devices is None:
        devices = {GPU: DeviceSample(**{"kind": "gpu", "name": "gpu", "total": 100, "free": 100, **gpu})}
    return Sample(taken, devices)


# --- a simulated machine ----------------------------------------------------------------------------------------------


@dataclass
class SimUnit:
    """One unit and what it really does: it takes ``uses`` bytes over ``load_time``, and gives them back when it ends."""

    name: str
    model: str
    claim: Claim
    devices: tuple[str, ...]
    uses: int
    load_time: float = 1.0
    unload_time: float = 0.25
    remote: bool = False
    pinned: bool = False
    ttl: float | None = None
    min_resident: float = 0.0
    slots: int = 2

    phase: Phase = Phase.ABSENT
    device: str | None = None
    pid: int | None = None
    bytes: int = 0
    began: float = 0.0
    """When the phase began."""
    idle_since: float = 0.0
    drained_for: str | None = None
    expired: bool = False
    backing_off: bool = False
    lingering_of_crash: int = 0
    requests: list[Request] = field(default_factory=list)

    def view(self, ledger: Ledger) -> UnitView:
        return UnitView(
            name=self.name,
            model=self.model,
            phase=self.phase,
            claim=self.claim,
            devices=self.devices,
            device=self.device,
            hold=ledger.held(self.name),
            attributed=ledger.attributed(self.name),
            busy=len(self.requests),
            pinned=self.pinned,
            resident_since=self.began if self.phase is Phase.RESIDENT else 0.0,
            idle_since=self.idle_since,
            min_resident=self.min_resident,
            ttl=self.ttl,
            drained_for=self.drained_for,
            expired=self.expired,
            backing_off=self.backing_off,
        )


@dataclass(eq=False)
class Request:
    model: str
    since: float
    takes: float
    ends: float = 0.0
    outcome: str = ""
    """``served``, ``refused`` or ``left``; empty while it waits."""
    at: float = 0.0
    """When it had its outcome."""


@dataclass
class Lingering:
    """Bytes of a process that is gone, which the device gives back later."""

    device: str
    bytes: int
    until: float
    of: SimUnit | None = None


TICK = 0.25
MARGIN = 5


class SimMachine:
    """Devices, processes and requests on a virtual clock; ``step`` is a tick of all of them, and a plan."""

    def __init__(self, totals: dict[str, int], units: list[SimUnit], *, strict: bool = False) -> None:
        self.now = 1000.0
        self.totals = totals
        self.units = {each.name: each for each in units}
        self.ledger = Ledger(MARGIN, max_sample_age=2.0, recovery=2.0)
        self.outside = dict.fromkeys(totals, 0)
        self.seen_outside = dict(self.outside)
        self.lingering: list[Lingering] = []
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preloads: list[str] = []
        self.strict = strict
        self.probing = True
        self.linger = 0.0
        self.allowed = dict.fromkeys(totals, 0)
        """Bytes by which outsiders have gone beyond what the ledger left them."""
        self.last_sample = 0.0
        self._pid = 1
        self._asked = 0
        self.last_plan: Plan | None = None
        self.probe()

    # --- what is true ---

    def free(self, name: str) -> int:
        used = sum(each.bytes for each in self.units.values() if each.device == name)
        back = sum(each.bytes for each in self.lingering if each.device == name)
        return self.totals[name] - self.outside[name] - used - back

    def promised(self, name: str) -> int:
        """All that is used or may yet be used, files once."""
        files: dict[str, int] = {}
        count = self.outside[name] + sum(each.bytes for each in self.lingering if each.device == name and not each.of)
        for each in self.units.values():
            if each.device != name:
                continue
            count += max(each.bytes + each.lingering_of_crash, self.ledger.held(each.name))
            if each.claim.file and each.phase is not Phase.ABSENT:
                files[each.claim.file] = each.claim.file_bytes
        return count + sum(files.values())

    def overshoot(self, name: str) -> int:
        return self.promised(name) - (self.totals[name] - MARGIN)

    # --- the probe ---

    def probe(self) -> None:
        if not self.probing:
            return
        self.now += 1e-4  # two samples are never of the same instant
        devices = {}
        for name, total in self.totals.items():
            ours = {u.pid: u.bytes for u in self.units.values() if u.device == name and u.pid and not u.remote}
            kind = "host" if name == HOST else "gpu"
            devices[name] = DeviceSample(kind, name, total, max(0, self.free(name)), ours)
        self.last_sample, self.seen_outside = self.now, dict(self.outside)
        self.ledger.observe(Sample(self.now, devices))

    # --- time ---

    def step(self) -> None:
        self.now += TICK
        self.lingering, back = [], self.lingering
        for each in back:
            if each.until > self.now:
                self.lingering.append(each)
            elif each.of is not None:
                each.of.lingering_of_crash -= each.bytes
        for request in [each for each in self.running if each.ends <= self.now]:
            self._finish(request)
        for each in self.units.values():
            self._advance(each)
        self.hand_over()
        self.probe()
        self.replan()
        self.hand_over()

    def _finish(self, request: Request) -> None:
        self.running.remove(request)
        for each in self.units.values():
            if request in each.requests:
                each.requests.remove(request)
                each.idle_since = self.now

    def _advance(self, each: SimUnit) -> None:
        passed = self.now - each.began
        if each.phase is Phase.LOADING and each.backing_off:
            if passed >= 1.0 and self.ledger.reload(each.name, self.now):
                each.backing_off = False
                for back in self.lingering:
                    back.of = None if back.of is each else back.of
                each.lingering_of_crash = 0
                self._spawn(each)
            elif passed >= 5.0:
                self._gone(each)
        elif each.phase is Phase.LOADING:
            each.bytes = min(each.uses, int(each.uses * passed / each.load_time))
            if passed >= each.load_time:
                each.phase, each.began, each.idle_since = Phase.RESIDENT, self.now, self.now
                self.ledger.resident(each.name, self.now)
        elif each.phase is Phase.DRAINING and not each.requests:
            each.phase, each.began = Phase.LEAVING, self.now
            assert not each.pinned, f"{each.name} is pinned and was stopped"
        elif each.phase is Phase.LEAVING and passed >= each.unload_time:
            self._gone(each)

    def _spawn(self, each: SimUnit) -> None:
        self._pid += 1
        each.pid, each.began, each.bytes = self._pid, self.now, 0
        self.ledger.attach(each.name, None if each.remote else each.pid)

    def _gone(self, each: SimUnit) -> None:
        assert not each.requests, f"{each.name} was stopped with requests in it"
        if self.linger and each.bytes:
            self.lingering.append(Lingering(each.device, each.bytes, self.now + self.linger))
        for back in self.lingering:
            back.of = None if back.of is each else back.of
        self.ledger.end(each.name, self.now)
        each.phase, each.device, each.pid, each.bytes, each.began = Phase.ABSENT, None, None, 0, self.now
        each.drained_for, each.expired, each.backing_off, each.lingering_of_crash = None, False, False, 0

    # --- events ---

    def ask(self, model: str, takes: float = 1.0) -> Request:
        self._asked += 1
        request = Request(model, self.now + self._asked / 1e6, takes)
        self.waiting.append(request)
        self.hand_over()
        return request

    def leave(self, request: Request) -> None:
        self.waiting.remove(request)
        request.outcome, request.at = "left", self.now

    def crash(self, each: SimUnit) -> None:
        """Its process dies; its requests go back to the queue; it is to be started again."""
        for request in each.requests:
            self.running.remove(request)
            self.waiting.append(request)
        each.requests.clear()
        if self.linger and each.bytes:
            self.lingering.append(Lingering(each.device, each.bytes, self.now + self.linger, each))
            each.lingering_of_crash += each.bytes
        each.bytes, each.pid = 0, None
        if each.phase in (Phase.DRAINING, Phase.LEAVING):
            self._gone(each)
        else:
            self.ledger.lost(each.name, self.now)
            each.phase, each.began, each.backing_off = Phase.LOADING, self.now, True

    def grow_outside(self, name: str, count: int) -> None:
        """Somebody else takes bytes that are really free. What the ledger could not know yet is not held against it."""
        count = max(-self.outside[name], min(count, self.free(name)))
        self.outside[name] += count
        self.probe()
        if count > 0:
            self.allowed[name] = max(0, self.overshoot(name)) + (0 if self.probing else self.allowed[name] + count)

    def hand_over(self) -> None:
        """Requests go to units that can take them, oldest first."""
        for request in sorted(self.waiting, key=lambda each: each.since):
            if self.strict and request is not min(self.waiting, key=lambda each: each.since):
                break
            free = [
                each
                for each in self.units.values()
                if each.model == request.model and each.phase is Phase.RESIDENT and len(each.requests) < each.slots
            ]
            if free:
                free[0].requests.append(request)
                self.waiting.remove(request)
                self.running.append(request)
                request.ends, request.outcome, request.at = self.now + request.takes, "served", self.now

    # --- planning ---

    def world(self) -> World:
        oldest: dict[str, Request] = {}
        for request in sorted(self.waiting, key=lambda each: each.since):
            oldest.setdefault(request.model, request)
        demands = [Demand(each.model, each.since) for each in oldest.values()]
        for place, model in enumerate(self.preloads):
            if model not in oldest:
                demands.append(Demand(model, float(place), 0, preload=True))
        views = [each.view(self.ledger) for each in self.units.values()]
        return World(self.now, self.ledger.views(self.now), views, demands, self.strict)

    def replan(self) -> Plan:
        before = self.world()
        decided = self.last_plan = plan(before)
        for action in decided.actions:
            self._act(action, before)
        for model in list(self.preloads):
            if decided.explanations.get(model) and decided.explanations[model].verdict in ("resident", "wait"):
                self.preloads.remove(model)
        return decided

    def _act(self, action, before: World) -> None:
        match action:
            case Load(name, where, hold):
                each = self.units[name]
                assert each.phase is Phase.ABSENT, f"{name} is loaded twice"
                assert self.now - self.last_sample <= 2.0, "a load needs a fresh sample"
                each.phase, each.device = Phase.LOADING, where
                self.ledger.hold(name, where, each.claim, self.now, hold)
                self._spawn(each)
            case Evict(name, by):
                each = self.units[name]
                assert not each.pinned, f"{name} is pinned and is evicted"
                if each.phase is Phase.LOADING:
                    assert each.backing_off, f"{name} is loading and is cut off"
                    self._gone(each)
                else:
                    assert each.phase is Phase.RESIDENT
                    assert self.now >= each.began + each.min_resident, f"{name} has not had its min_resident"
                    each.phase, each.drained_for = Phase.DRAINING, by
            case Expire(name):
                each = self.units[name]
                assert each.phase is Phase.RESIDENT
                assert not each.requests
                each.phase, each.expired = Phase.DRAINING, True
            case Abandon(name):
                each = self.units[name]
                assert each.phase is Phase.DRAINING
                each.phase, each.drained_for, each.expired = Phase.RESIDENT, None, False
            case Refuse(model, _, explanation):
                for request in [each for each in self.waiting if each.model == model]:
                    self.waiting.remove(request)
                    request.outcome, request.at = "refused", self.now
                self.check_refusal(model, explanation)

    # --- what must always hold ---

    def check_refusal(self, model: str, explanation) -> None:
        """Nobody is refused what would fit if everything that may go went."""
        for each in (each for each in self.units.values() if each.model == model):
            for where in each.devices:
                stays = {u.claim.file: u.claim.file_bytes for u in self.units.values() if self._stays(u, where)}
                stays |= {each.claim.file: each.claim.file_bytes}
                kept = sum(max(u.bytes, self.ledger.held(u.name)) for u in self.units.values() if self._stays(u, where))
                # Of a server that is not our child both its bytes and its hold are taken off.
                kept += sum(u.bytes for u in self.units.values() if self._stays(u, where) and u.remote)
                room = self.totals[where] - MARGIN - self.seen_outside[where] - kept - sum(stays.values())
                residues = sum(self.ledger.held(u.name) for u in self.units.values() if u.phase is Phase.ABSENT)
                back = sum(each.bytes for each in self.lingering if each.device == where)
                assert each.claim.peak > room - back - residues, f"{model} was refused: {explanation.reason}"

    def _stays(self, each: SimUnit, where: str) -> bool:
        return each.device == where and each.pinned

    def check(self) -> None:
        for name in self.totals:
            over = self.overshoot(name)
            assert over <= self.allowed[name], f"{name} is promised {over} bytes beyond its budget"
            self.allowed[name] = max(0, min(self.allowed[name], over)) if self.probing else self.allowed[name]
        owners = {each.owner for each in self.ledger.holds() if each.state in ("loading", "resident")}
        assert owners == {each.name for each in self.units.values() if each.phase is not Phase.ABSENT}

    def copy(self, keep: set[int]) -> SimMachine:
        """The same machine without those waiting requests whose place in the queue is not in ``keep``."""
        other = copy.deepcopy(self)
        ordered = sorted(other.waiting, key=lambda each: each.since)
        other.waiting = [each for place, each in enumerate(ordered) if place in keep]
        return other
