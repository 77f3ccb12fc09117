"""Catalog: what each configured model will need and where it may be, from the file, from what was measured, or guessed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from slimproc import logs
from slimproc.config import Config, ModelConfig
from slimproc.errors import ConfigError
from slimproc.residency.devices import Usable, gpu_offload_possible, resolve_device, usable_devices
from slimproc.residency.estimate import estimate
from slimproc.residency.probes.faults import in_words
from slimproc.residency.probes.lines import ABSENT
from slimproc.residency.profiles import ProfileStore, profile_key
from slimproc.residency.unit import Unit
from slimproc.residency.views import HOST, Claim, DeviceSample, Sample
from slimproc.settings import BACKENDS

log = logs.get("slimproc.residency")

_GPU: Final = "gpu"
_STAND_IN: Final = "SLIMPROC_FAKE_NVML"
"""Where the fake backend takes its bytes from a stand-in NVML, its models are GPU models."""


class Catalog:
    """Knows no replicas and no holds. ``environ`` is the server's own environment."""

    def __init__(self, config: Config, environ: Mapping[str, str], store: ProfileStore) -> None:
        self._config = config
        self._environ = environ
        self._store = store
        self._offload: dict[str, bool] = {}
        """By backend: whether its library was built for a GPU."""
        self._known: tuple[frozenset[str], str | None] | None = None
        self._usable = Usable(())

    def reconfigure(self, config: Config) -> None:
        self._config = config

    def check(self, model: ModelConfig) -> None:
        """Raise ConfigError for a device that is not there, once it is known which there are."""
        if model.device is not None and self._known is not None and self._known[1] in ("", ABSENT):
            resolve_device(model.device, self._usable.devices, param=f"models.{model.name}.device")
        self._check_certain(model, self._usable.devices)

    def _check_certain(self, model: ModelConfig, usable: Sequence[str]) -> None:
        """Raise ConfigError for a server of which nobody could tell on which of several GPUs it has its model. (What we
        start ourselves is put on one.)
        """
        gpus = [device for device in usable if device != HOST]
        if model.remote is not None and model.device is None and len(gpus) > 1 and self.wants_gpu(model):
            key = f"models.{model.name}.device"
            raise ConfigError(f"{key} is missing: on which one is its server, {', '.join(gpus)} or host?", param=key)

    # --- needs --------------------------------------------------------------------------------------------------------

    def wants_gpu(self, model: ModelConfig) -> bool:
        """It goes on a GPU where there is one."""
        if model.device is not None:
            return model.device != HOST
        if model.upstream is not None:
            return model.memory is not None
        assert model.backend is not None, "what is no upstream has a backend"
        traits = BACKENDS[model.backend]
        if traits.declares_bytes:
            return model.fake.bytes > 0 and _STAND_IN in self._environ
        if not traits.offloads or model.gpu_layers == 0:
            return False
        if model.backend not in self._offload:
            self._offload[model.backend] = gpu_offload_possible(traits, self._environ)
        return self._offload[model.backend]

    def claim(self, model: ModelConfig) -> Claim:
        """What the file says, else what was measured, else an estimate."""
        kind = self._kind(model)
        guess = Claim(0, 0) if model.backend is None else estimate(model, kind, self._environ)
        if model.memory is not None:
            given = model.memory
            # What a mapped file takes is in nobody's peaks: it counts once for all who map it.
            return Claim(
                given.load_peak, given.inference_peak, given.residual, guess.file, guess.file_bytes, source="configured"
            )
        key = profile_key(model, kind, self._environ)
        seen = self._store.get(key) if key is not None else None
        if seen is None:
            return guess
        return Claim(*seen, file=guess.file, file_bytes=guess.file_bytes, source="measured")

    @property
    def profile_write_failures(self) -> int:
        """Times that something measured could not be kept."""
        return self._store.write_failures

    def keep(self, unit: Unit, seen: Claim) -> None:
        """Remember what an unmeasured model was seen to need."""
        model = unit.config
        key = profile_key(model, self._kind(model), self._environ) if model.memory is None else None
        if key is not None:
            self._store.put(key, model.name, seen)

    def _kind(self, model: ModelConfig) -> str:
        return _GPU if self.wants_gpu(model) and self._known != (frozenset({HOST}), ABSENT) else HOST

    # --- places -------------------------------------------------------------------------------------------------------

    def look(self, sample: Sample, driver: str | None) -> None:
        """Learn which devices there are. Raises ConfigError for one that is configured and is not there, the first time;
        a device that goes away later has a fault in the sample, and a driver that stops answering takes none away.
        """
        known = frozenset(sample.devices), driver
        if known == self._known:
            return
        try:
            usable = usable_devices(sample, self._config.memory.devices, self._environ, driver=driver)
            for model in self._config.models.values():
                if model.device is not None and driver in ("", ABSENT):
                    resolve_device(model.device, usable.devices, param=f"models.{model.name}.device")
                self._check_certain(model, usable.devices)
        except ConfigError as error:
            if self._known is None or self._known[1] is None:
                raise
            log.warning("the devices have changed", reason=error.message)
            self._known = known
            return
        for warning in usable.warnings:
            log.warning(warning)
        self._known, self._usable = known, usable

    @property
    def driver_fault(self) -> str:
        """Why nobody knows which GPUs there are; empty: it is known, or no probe has spoken yet."""
        driver = self._known[1] if self._known is not None else None
        return "" if driver in (None, "", ABSENT) else driver

    def with_unseen(self, sample: Sample) -> Sample:
        """The sample, and in it with the driver's fault those GPUs of which only the configuration knows as long as the
        driver tells of none.
        """
        fault = self.driver_fault
        unseen = [device for device in self._usable.devices if device not in sample.devices] if fault else []
        if not unseen:
            return sample
        more = {device: DeviceSample("gpu", device, 0, 0, None, fault=fault) for device in unseen}
        return dataclasses.replace(sample, devices={**sample.devices, **more})

    def obstacle(self, model: ModelConfig, sample: Sample) -> str:
        """Why a model can be loaded nowhere as long as the devices and their driver are as they are. Empty: it may be."""
        places = self.places(model)
        faults = [sample.devices[device].fault if device in sample.devices else "it is not there" for device in places]
        if places:
            return f"{places[0]}: {in_words(faults[0])}" if all(faults) else ""
        if self.driver_fault and self.wants_gpu(model):
            return f"the NVIDIA driver does not answer: {in_words(self.driver_fault)}"
        if self._known is not None and self._known[1] is not None:
            return f"it may use no device of those that there are ({', '.join(sample.devices)})"
        return ""

    def place(self, unit: Unit) -> tuple[str, ...]:
        """Where a unit may be: see ``places``."""
        return self.places(unit.config)

    def places(self, model: ModelConfig) -> tuple[str, ...]:
        """Where a model may be, best first: the device it names; else the GPUs, if it can use one; else the host. Without
        any GPU in the machine the host is meant; with one that does not answer it is not, for that would be too slow to
        be what anybody wanted.
        """
        usable = self._usable.devices
        if model.device is not None:
            try:
                return (resolve_device(model.device, usable),)
            except ConfigError:
                return ()
        gpus = tuple(device for device in usable if device != HOST)
        no_gpu = self._known is not None and self._known[1] == ABSENT
        if self.wants_gpu(model) and (gpus or not no_gpu):
            return gpus
        return (HOST,) if HOST in usable else ()
