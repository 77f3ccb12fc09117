"""Real replicas, ledger and manager over engines that are only played, with their memory, requests and deaths."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from slimproc.admission import policy, routing
from slimproc.metrics import ModelMetrics
from slimproc.replicas.life import Life, Post, Refusal, Sighting
from slimproc.replicas.limits import ReplicaLimits
from slimproc.replicas.replica import Replica
from slimproc.replicas.restart import RestartPolicy
from slimproc.replicas.states import ReplicaEvent, ReplicaState
from slimproc.residency.ledger import Ledger
from slimproc.residency.manager import ResidencyManager
from slimproc.residency.unit import Unit
from slimproc.residency.views import HOST, Claim, Demand, DeviceSample, Sample
from tests.residency.virtual import until

PROBE_EVERY = 0.25


@dataclass
class Settings:
    """What a model's configuration says, and how its played engines behave. Bytes, seconds."""

    name: str
    bytes: int = 60
    pin: bool = False
    ttl: float | None = None
    min_resident: float = 0.0
    replicas: int = 1
    slots: int = 2
    load_time: float = 1.0
    unload_time: float = 0.5
    load_error: str = ""
    devices: tuple[str, ...] = (HOST,)
    remote: bool = False


@dataclass
class Asked:
    """A request: what it waits for, how long it takes there, and what became of it."""

    model: str
    takes: float
    since: float
    outcomes: list[Any] = field(default_factory=list)


class PlayedLife:
    """An engine; ``die`` ends it at any moment."""

    def __init__(self, source: PlayedSource, device: str, post: Post, on_slot_free: Any) -> None:
        self.settings = source.settings
        self.name, self.device = source.name, device
        self.pid: int | None = None if source.settings.remote else next(source.house.pids)
        self.is_ready = False
        self.ready_since = self.load_seconds = 0.0
        self.progress = 0.0
        self.refused: Refusal | None = None
        self.status: str | None = None
        self.tokens = 0
        self.unload_failed = ""
        self.killable = True
        self.bytes = self.settings.bytes // 2
        self.taken: list[Asked] = []
        self.exiting = False
        self.broken = False
        """It stalled, is corrupt, or its device was lost: then who is in it is lost anyway."""
        self._source, self._post, self._on_slot_free = source, post, on_slot_free
        self._house = source.house
        self._house.lives.append(self)
        self._later(self.settings.load_time, self._loaded)

    def _later(self, seconds: float, what: Any, *args: Any) -> None:
        asyncio.get_running_loop().call_later(seconds, lambda: None if self.status else what(*args))

    def _loaded(self) -> None:
        if self.exiting:
            return
        if self.settings.load_error:
            self.refused = Refusal(self.settings.load_error)
            self.die()
            return
        self.bytes = self.settings.bytes
        self.is_ready, self.ready_since, self.progress = True, time.monotonic(), 1.0
        self._post(ReplicaEvent.READY_RECEIVED, self, "")

    def die(self, reason: str = "it was killed") -> None:
        """Its process is gone, and its memory with it."""
        if self.status is None:
            self.status, self.bytes = reason, 0
            self._post(ReplicaEvent.EXITED, self, reason)

    @property
    def slots(self) -> int:
        return self.settings.slots if self.is_ready else 0

    @property
    def free_slots(self) -> int:
        return self.slots - len(self.taken)

    @property
    def occupied(self) -> int:
        return len(self.taken)

    @property
    def in_flight(self) -> int:
        return len(self.taken)

    @property
    def drained(self) -> bool:
        return not self.taken

    def serve(self, asked: Asked) -> None:
        self.taken.append(asked)
        self._later(asked.takes, self._served, asked)

    def _served(self, asked: Asked) -> None:
        self.taken.remove(asked)
        asked.outcomes.append("served")
        self._on_slot_free()

    def take_slot(self) -> Any:
        raise AssertionError("requests are served by ``serve``")

    def drain(self, *, begin: bool) -> None:
        pass

    def ask_to_exit(self) -> None:
        if self.taken and not self.broken and not self._house.faults[self.device]:
            self._house.cut_off.append(self.name)
        self.exiting = True
        self._later(self.settings.unload_time, self.die)

    def terminate(self) -> None:
        self.die()

    def kill(self) -> None:
        self.die()

    def let_go(self) -> None:
        pass

    def give_up(self, reason: str) -> None:
        pass

    def bury(self, reason: str) -> None:
        for asked in self.taken:
            asked.outcomes.append(reason)
        self.taken.clear()


class PlayedSource:
    def __init__(self, house: House, name: str, settings: Settings) -> None:
        self.house, self.name, self.settings = house, name, settings
        self.slots = settings.slots
        unloaded = Sighting("unloaded", "not_resident", asked=True, let_go=True)
        self.sighting: Sighting | None = unloaded if settings.remote else None

    def start(self, *, device: str | None, post: Post, on_slot_free: Any, on_news: Any) -> Life:
        del on_news
        assert device is not None
        return PlayedLife(self, device, post, on_slot_free)

    def made_from(self) -> Any:
        return None

    async def watch(self, on_news: Any) -> None:
        self.on_news = on_news

    def see(self, state: Any, residency: Any, *, asked: bool = True) -> None:
        """What its server is found to be from now on."""
        self.sighting = Sighting(state, residency, asked=asked, let_go=state == "unloaded")
        self.on_news()


class House:
    """``async with`` runs it; at its end everything is stopped and nothing may be left."""

    def __init__(
        self,
        *models: Settings,
        totals: dict[str, int] | None = None,
        drain_timeout: float = 180.0,
        strict: bool = False,
    ) -> None:
        self.totals = totals or {HOST: 100}
        self.others = dict.fromkeys(self.totals, 0)
        self.faults = dict.fromkeys(self.totals, "")
        self.probing = True
        self.pids = itertools.count(100)
        self.lives: list[PlayedLife] = []
        self.cut_off: list[str] = []
        self.evicted: list[str] = []
        self.kept: dict[str, Claim] = {}
        self.requests: list[Asked] = []
        self.waiting: list[Asked] = []
        self.metrics = ModelMetrics()
        self.sources: dict[str, PlayedSource] = {}
        self.units = [self._unit(model, index) for model in models for index in range(model.replicas)]
        self.ledger = Ledger(0, max_sample_age=5.0)
        self.manager = ResidencyManager(
            self.units,
            self.ledger,
            demands=self._demands,
            fail_waiting=self._fail_waiting,
            watch=lambda _: None,
            place=lambda unit: unit.config.devices,
            keep=lambda unit, claim: self.kept.update({unit.model: claim}),
            on_eviction=self.evicted.append,
            refresh=lambda device: device == HOST and self.probing and self.manager.on_sample(self.sample()),
            strict=strict,
            drain_timeout=drain_timeout,
            max_sample_age=5.0,
        )
        for unit in self.units:
            unit.replica.may_start = self.manager.may_start
            unit.replica.on_unload_failed = self.manager.on_unload_failed
        self._tasks: list[asyncio.Task[None]] = []

    def _unit(self, model: Settings, index: int) -> Unit:
        source = PlayedSource(self, f"{model.name}/{index}", model)
        self.sources[source.name] = source
        replica = Replica(
            model.name,
            index,
            source,
            ReplicaLimits(60.0, 10.0),
            self.metrics,
            on_change=self._on_change,
            policy=RestartPolicy(jitter=lambda: 0.5),
        )
        return Unit(replica, model, lambda: Claim(model.bytes, model.bytes, source="configured"))  # type: ignore[arg-type]

    # --- its life -----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        for unit in self.units:
            self._tasks += [asyncio.create_task(unit.replica.run()), asyncio.create_task(unit.replica.watch())]
        await asyncio.sleep(0)
        self._tasks += [asyncio.create_task(self.manager.run()), asyncio.create_task(self._probe())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.shut_down()
            await asyncio.sleep(1.0)
            self.check()
            assert [life.name for life in self.lives if life.status is None] == []
            assert [hold.owner for hold in self.ledger.holds()] == [], "a hold was left behind"
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        assert error or not [each for each in ended if isinstance(each, Exception)], ended

    async def shut_down(self) -> None:
        self.probing = True
        self.manager.close()
        for unit in self.units:
            unit.replica.ask_stop(0.0, 5.0)
        await asyncio.sleep(0)  # as the supervisor does
        for unit in self.units:
            await unit.replica.wait_stopped()

    async def _probe(self) -> None:
        while True:
            if self.probing:
                self.manager.on_sample(self.sample())
            await asyncio.sleep(PROBE_EVERY)

    def sample(self) -> Sample:
        found = {}
        for device, total in self.totals.items():
            here = [life for life in self.lives if life.device == device and life.status is None]
            free = max(0, total - self.others[device] - sum(life.bytes for life in here))
            theirs = {life.pid: life.bytes for life in here if life.pid is not None}
            kind = "host" if device == HOST else "gpu"
            found[device] = DeviceSample(kind, device, total, free, theirs, fault=self.faults[device])
        return Sample(time.monotonic(), found)

    # --- requests -----------------------------------------------------------------------------------------------------

    def ask(self, model: str, takes: float = 0.1) -> Asked:
        asked = Asked(model, takes, time.monotonic())
        self.requests.append(asked)
        self.waiting.append(asked)
        self._dispatch(model)
        self.manager.wake()
        return asked

    def leave(self, asked: Asked) -> None:
        if asked in self.waiting:
            self.waiting.remove(asked)
            asked.outcomes.append("left")
            self.manager.wake()

    def _on_change(self, replica: Replica) -> None:
        self.manager.on_replica_change(replica)
        self._dispatch(replica.model)
        if policy.hopeless([routing.view(unit.replica) for unit in self.of(replica.model)]):
            self._fail_waiting(replica.model, RuntimeError(replica.reason), None)

    def _dispatch(self, model: str) -> None:
        for asked in [each for each in self.waiting if each.model == model]:
            serving = [unit.replica.serving for unit in self.of(model)]
            free = [life for life in serving if isinstance(life, PlayedLife) and life.free_slots > 0]
            if not free:
                return
            self.waiting.remove(asked)
            free[0].serve(asked)

    def _demands(self) -> list[Demand]:
        found = {}
        for asked in self.waiting:
            found.setdefault(asked.model, Demand(asked.model, asked.since))
        return list(found.values())

    def _fail_waiting(self, model: str, error: Exception, before: float | None) -> None:
        for asked in [each for each in self.waiting if each.model == model]:
            if before is None or asked.since <= before:
                self.waiting.remove(asked)
                asked.outcomes.append(error)

    # --- looking ------------------------------------------------------------------------------------------------------

    def of(self, model: str) -> list[Unit]:
        return [unit for unit in self.units if unit.model == model]

    def state(self, model: str) -> ReplicaState:
        return self.of(model)[0].replica.state

    def life(self, model: str) -> PlayedLife:
        life = self.of(model)[0].replica.life
        assert isinstance(life, PlayedLife)
        return life

    async def until_state(self, model: str, state: ReplicaState, limit: float = 120.0) -> None:
        await until(lambda: self.state(model) is state, f"{model} is {state.value}", limit)

    async def until_answered(self, *asked: Asked, limit: float = 120.0) -> None:
        await until(lambda: all(each.outcomes for each in asked), f"everybody is answered, of {asked}", limit)

    def check(self) -> None:
        """What holds at every moment."""
        assert self.cut_off == [], "somebody busy was stopped"
        assert all(len(asked.outcomes) <= 1 for asked in self.requests), "somebody was answered twice"
        active = {hold.owner for hold in self.ledger.holds() if hold.state in ("loading", "resident")}
        held = {unit.name for unit in self.units if unit.device is not None}
        assert active == held, "each hold has its owner"
        running = {unit.name for unit in self.units if unit.replica.has_process}
        assert running <= held, "nobody runs without a hold"
        for device, total in self.totals.items():
            mine = sum(life.bytes for life in self.lives if life.device == device and life.status is None)
            assert mine <= total, "more was loaded than fits"
