"""Place: on which device a model is measured: where a server would load it, by the same rules."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Final

import msgspec

from slimproc.cli.measuring.failures import CannotMeasure
from slimproc.cli.measuring.subject import Subject
from slimproc.config import Config, MemoryProfile, ModelConfig, Remote
from slimproc.residency.catalog import Catalog
from slimproc.residency.estimate import estimate
from slimproc.residency.profiles import ProfileStore
from slimproc.residency.sampler import Sampler
from slimproc.residency.unit import Unit
from slimproc.residency.views import Claim, DeviceSample, Sample

_DRIVER_LIMIT: Final = 15.0
"""Seconds for the driver to say which GPUs there are: a GPU that sleeps may take that long."""


class Place:
    """Knows no meter and no rounds. ``environ`` is our own environment."""

    def __init__(self, config: Config, subject: Subject, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._catalog = Catalog(config, environ, ProfileStore(config.state_dir))
        model = _as_measured(subject.model)
        self._unit = Unit(subject.replica, model, lambda: self._catalog.claim(model))

    async def find(self, sampler: Sampler, news: asyncio.Event) -> tuple[str, DeviceSample]:
        """The device and what was last seen of it; ``news`` is set at every sample. Raises CannotMeasure, and ConfigError
        for a device in the configuration that is not there.
        """
        sample = await self._devices(sampler, news)
        self._catalog.look(sample, sampler.driver)
        devices = [device for device in self._catalog.place(self._unit) if device in sample.devices]
        name = self._unit.model
        if not devices:
            wanted = self._unit.config.device or "a GPU"
            reason = "the driver does not answer" if sampler.driver is None else sampler.driver or "it is not there"
            raise CannotMeasure(f"{name}: it needs {wanted}, which cannot be used now: {reason}")
        if len(devices) > 1 and isinstance(self._unit.config.upstream, Remote):
            listed = ", ".join(devices)
            raise CannotMeasure(f"{name}: say on which GPU its server is, by the model's key device: {listed}")
        # A server takes the first with enough room, which nobody knows yet.
        device = max(devices, key=lambda one: sample.devices[one].free)
        if fault := sample.devices[device].fault:
            raise CannotMeasure(f"{name}: {device} is of no use now: {fault}")
        return device, sample.devices[device]

    async def _devices(self, sampler: Sampler, news: asyncio.Event) -> Sample:
        """A sample of which the driver has had its say, or none in time."""
        deadline = time.monotonic() + _DRIVER_LIMIT
        while sampler.latest is None or sampler.driver is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return sampler.sample_now()
            news.clear()
            try:
                async with asyncio.timeout(left):
                    await news.wait()
            except TimeoutError:
                continue
        return sampler.latest

    def mapped_file(self, device: str) -> Claim:
        """The claim that names the file which the model maps on ``device``, if it does: the same one as in a server."""
        if self._unit.config.backend is None:
            return Claim(0, 0)
        return estimate(self._unit.config, device, self._environ)

    def keep(self, seen: Claim) -> None:
        """Remember a local model's needs, so that they count without being in the configuration."""
        if self._unit.config.backend is not None:
            self._catalog.keep(self._unit, seen)


def _as_measured(model: ModelConfig) -> ModelConfig:
    """An upstream has its place when it has been measured; a local model's own block would hide what is kept of it."""
    memory = None if model.backend is not None else MemoryProfile(load_peak=0, inference_peak=0)
    return msgspec.structs.replace(model, memory=memory)
