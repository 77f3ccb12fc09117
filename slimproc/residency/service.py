"""ResidencyService: everything that decides what is in memory, put together: sampler, ledger, catalog and manager."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

from slimproc.config import Config, ModelConfig
from slimproc.errors import ConfigError
from slimproc.replicas.replica import Replica
from slimproc.residency.attribution import Attribution
from slimproc.residency.catalog import Catalog
from slimproc.residency.ledger import Ledger
from slimproc.residency.manager import FailWaiting, ResidencyManager
from slimproc.residency.probes.faults import DRIVER, KINDS, in_words, kind_of
from slimproc.residency.profiles import ProfileStore
from slimproc.residency.sampler import Sampler
from slimproc.residency.unit import Unit
from slimproc.residency.views import HOST, Claim, Demand, DeviceReport, Explanation, Sample

_PROBE_DELAY: Final = 1.0
"""Seconds after the start, where no GPU is wanted: the first sample is the front's own, and the loads come first."""

_KNOWN_LIMIT: Final = 10.0
"""Seconds that a reload waits for the first word of the drivers."""


class ResidencyService:
    """``manager`` has the news and the wishes; ``run`` is the one task."""

    def __init__(
        self,
        config: Config,
        replicas: Iterable[Replica],
        environ: Mapping[str, str],
        probe_environ: Mapping[str, str],
        *,
        demands: Callable[[], Iterable[Demand]],
        fail_waiting: FailWaiting,
        on_eviction: Callable[[str], None],
    ) -> None:
        """``probe_environ`` is the probe's whole environment; slimproc has to be found with it."""
        policy = config.memory
        self._config = config
        self._catalog = Catalog(config, environ, ProfileStore(config.state_dir))
        self._ledger = Ledger(policy.margin, policy.max_sample_age)
        self._sampler = Sampler(self._on_sample, environ=probe_environ, host_limit=policy.host_limit)
        self._attribution = Attribution()
        self._latest: Sample | None = None
        self._checked = asyncio.Event()
        """The configured peaks were held against the devices that there are."""
        self._units: list[Unit] = []
        self._unmanaged: list[Replica] = []
        """Servers without a lifecycle: they are there, or they are not."""
        for replica in replicas:
            model = config.models[replica.model]
            if model.managed:
                self._units.append(Unit(replica, model, self._claim_of(model)))
            else:
                self._unmanaged.append(replica)
        self.manager = self._make_manager(config, demands, fail_waiting, on_eviction)
        for unit in self._units:
            self._listen(unit)

    def _make_manager(
        self,
        config: Config,
        demands: Callable[[], Iterable[Demand]],
        fail_waiting: FailWaiting,
        on_eviction: Callable[[str], None],
    ) -> ResidencyManager:
        return ResidencyManager(
            self._units,
            self._ledger,
            demands=demands,
            fail_waiting=fail_waiting,
            watch=self._sampler.watch,
            place=self._catalog.place,
            keep=self._catalog.keep,
            on_eviction=on_eviction,
            refresh=self._refresh,
            obstacle=lambda unit: self.obstacle(unit.config.name),
            strict=config.order == "strict",
            drain_timeout=config.drain_timeout,
            max_sample_age=config.memory.max_sample_age,
        )

    def _listen(self, unit: Unit) -> None:
        unit.replica.may_start = self.manager.may_start
        unit.replica.on_unload_failed = self.manager.on_unload_failed

    # --- another configuration ----------------------------------------------------------------------------------------

    async def wait_known(self) -> None:
        """Wait until it is known which devices there are, which ``check`` needs. Raises ConfigError where it takes too long."""
        try:
            async with asyncio.timeout(_KNOWN_LIMIT):
                await self._checked.wait()
        except TimeoutError:
            raise ConfigError("it is not known yet which devices there are: try again") from None

    def check(self, config: Config) -> None:
        """Raise ConfigError for what the devices that there are rule out."""
        for model in config.models.values():
            self._catalog.check(model)
            if model.managed:
                self._check_peak(model, self._catalog.claim(model), self._catalog.places(model))

    def reconfigure(self, config: Config, added: Iterable[Replica]) -> None:
        """Another configuration from now on, and more replicas, which are loaded when they are wanted."""
        policy = config.memory
        self._config = config
        self._catalog.reconfigure(config)
        self._ledger.reconfigure(policy.margin, policy.max_sample_age)
        for unit in self._units:
            if not unit.retired and unit.model in config.models:
                unit.config = config.models[unit.model]
        for replica in added:
            model = config.models[replica.model]
            if model.managed:
                unit = Unit(replica, model, self._claim_of(model))
                self._listen(unit)
                self._units.append(unit)
                self.manager.add(unit)
            else:
                self._unmanaged.append(replica)
                replica.ask_start()
        self.manager.reconfigure(
            strict=config.order == "strict",
            drain_timeout=config.drain_timeout,
            max_sample_age=policy.max_sample_age,
        )

    def retire(self, replica: Replica) -> None:
        """It is about to be stopped for good; ``remove`` it then."""
        self.manager.retire(replica.name)

    def remove(self, replica: Replica) -> None:
        """It has stopped."""
        self._units = [unit for unit in self._units if unit.replica is not replica]
        self._unmanaged = [other for other in self._unmanaged if other is not replica]
        self.manager.remove(replica.name)

    def begin(self, added: Collection[str], again: Collection[str]) -> None:
        """Load what is new as at a start, and again what was in memory and was replaced."""
        self.manager.preload(name for name in self._preload if name in added)
        for name in again:
            self.manager.load(name)

    @property
    def _preload(self) -> tuple[str, ...]:
        if self._config.preload is not None:
            return self._config.preload
        return tuple(name for name, model in self._config.models.items() if model.backend is not None)

    def _claim_of(self, model: ModelConfig) -> Callable[[], Claim]:
        return lambda: self._catalog.claim(model)

    def _on_sample(self, sample: Sample) -> None:
        self._catalog.look(sample, self._sampler.driver)
        self._latest = self._catalog.with_unseen(sample)
        self.manager.on_sample(self._latest)
        self._attribution.look(self._units, sample)
        if not self._checked.is_set():  # what shrinks later is no fault of the configuration
            self._check_peaks(known=self._sampler.driver is not None)

    def _refresh(self, device: str) -> None:
        """The host's memory is back when a process is gone, and can be read without a probe: nobody waits for the next."""
        latest = self._sampler.latest
        if device == HOST and (latest is None or latest.devices.keys() == {HOST}):
            self.manager.on_sample(self._catalog.with_unseen(self._sampler.sample_now()))

    def _check_peaks(self, *, known: bool) -> None:
        """Of the host all is known at once; of the others when the driver has had its say (``known``)."""
        if known:
            self._checked.set()
        for unit in self._units:
            if known or unit.devices == (HOST,):
                self._check_peak(unit.config, unit.claim, unit.devices)

    def _check_peak(self, model: ModelConfig, claim: Claim, places: Sequence[str]) -> None:
        """Raise ConfigError for a configured peak that no device could ever hold."""
        seen = self._ledger.views(time.monotonic())
        devices = {device: view for device, view in seen.items() if view.total}  # else nobody knows what it has
        rooms = [devices[device].total - devices[device].margin for device in places if device in devices]
        if model.memory is not None and rooms and claim.peak > max(rooms):
            key = "load_peak" if claim.load_peak > max(rooms) else "inference_peak"
            raise ConfigError(
                f"models.{model.name}.memory.{key}: {claim.peak} bytes are more than {', '.join(places)} "
                f"can have ({max(rooms)} without the margin)",
                param=f"models.{model.name}.memory.{key}",
            )

    # --- looking ----------------------------------------------------------------------------------------------------

    def devices(self) -> list[DeviceReport]:
        """Every device of the latest sample."""
        sample = self._latest
        if sample is None:
            return []
        found = []
        for device, view in self._ledger.views(time.monotonic()).items():
            name = sample.devices[device].name if device in sample.devices else device
            found.append(
                DeviceReport(
                    id=device,
                    kind=view.kind,
                    name=name,
                    total=view.total,
                    free=view.free,
                    taken=sample.taken,
                    fresh=view.fresh,
                    available=view.available,
                    held=view.held,
                    fault=view.fault,
                )
            )
        return found

    def held(self, model: str) -> int:
        """Bytes that are kept for a model: its files are counted though others share them."""
        return sum(unit.hold + unit.claim.file_bytes for unit in self.manager.units(model) if unit.device is not None)

    def preloading(self, model: str) -> bool:
        """It is to be in memory, for the start or for an operator, and has not been yet."""
        return self.manager.wanted(model)

    def obstacle(self, model: str) -> str:
        """Why a model can be loaded nowhere as long as the devices and their driver are as they are; empty: it may be."""
        config = self._config.models.get(model)
        if config is None or not config.managed or self._latest is None:
            return ""
        return self._catalog.obstacle(config, self._latest)

    @property
    def driver_fault(self) -> str:
        """What is wrong with the NVIDIA driver, for people; empty: nothing, or there is none."""
        return in_words(self._catalog.driver_fault)

    def explain(self, model: str) -> Explanation:
        """What would happen, or does, if somebody asked for ``model`` now."""
        if not self.manager.units(model):
            return Explanation(model, "resident", f"{model} is a server that nobody loads or unloads")
        return self.manager.explain(model)

    def load(self, model: str) -> None:
        """An operator wants it in memory."""
        self.manager.load(model)

    def unload(self, model: str) -> None:
        """An operator wants it out."""
        self.manager.unload(model)

    def statistics(self) -> dict[tuple[str, str], float]:
        """Bytes by device and kind, for the gauge."""
        by_device = self._ledger.statistics(time.monotonic())
        return {(device, kind): value for device, kinds in by_device.items() for kind, value in kinds.items()}

    def profile_write_failures(self) -> int:
        """Times that something measured could not be kept, for the counter."""
        return self._catalog.profile_write_failures

    def faults(self) -> dict[tuple[str, str], float]:
        """1 for the kind of each fault by device, for the gauge; the driver as a whole is a device of its own."""
        found = {DRIVER: self._catalog.driver_fault}
        if self._latest is not None:
            found |= {device: seen.fault for device, seen in self._latest.devices.items() if device != HOST}
        return {
            (device, kind): float(bool(fault) and kind_of(fault) == kind)
            for device, fault in found.items()
            for kind in KINDS
        }

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin what is to be in memory from the start. Where no GPU is wanted, the loads begin at once."""
        for replica in self._unmanaged:
            replica.ask_start()
        self.manager.preload(self._preload)
        if not self._wants_gpu:
            self._on_sample(self._sampler.sample_now())

    async def run(self) -> None:
        """Sample, plan and act until cancelled. Raises ConfigError (in a group) when the devices are not those configured."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.manager.run(), name="residency")
            group.create_task(self._sample(), name="sampler")

    async def _sample(self) -> None:
        if not self._wants_gpu:
            await asyncio.sleep(_PROBE_DELAY)
        await self._sampler.run()

    @property
    def _wants_gpu(self) -> bool:
        return any(self._catalog.wants_gpu(unit.config) for unit in self._units)
