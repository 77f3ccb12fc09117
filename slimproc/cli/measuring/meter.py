"""Meter: the highest number of bytes that a model had on one device, phase by phase.

Of a process group it is what the device attributes to it; on the host private bytes, and mapped ones where the model names
no file that it maps: as the ledger counts them. Where nobody can tell whose bytes are whose, and for servers that are no children of
ours, it is what the whole device has in use above its baseline: an upper bound, if somebody else uses it, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from slimproc.cli.measuring import high_water
from slimproc.cli.measuring.failures import CannotMeasure
from slimproc.residency.probes import processes
from slimproc.residency.probes.host import sample_host
from slimproc.residency.probes.shares import Bytes, Shares, doubtful
from slimproc.residency.views import HOST, DeviceSample, Sample

MIB = 1 << 20
_EVERY = 0.02
"""Seconds between two readings of the host, which are taken here; of a GPU, the probe says how often."""
_SILENCE = 20.0
"""Seconds without a good reading after which there is nothing to measure with."""
_NOISE = 16 * MIB
"""Use that moves less than this does not move; a device without others moves by nothing."""
_BACK = MIB
"""So near its baseline, a device has everything back."""


@dataclass(frozen=True)
class Reading:
    taken: float
    used: int
    """Of the device, by whomever."""
    own: int | None
    """What counts of the process group; None: there is none, or it cannot be told."""
    mapped: int


@dataclass(frozen=True)
class Peak:
    """The highest of one phase. ``whole``: of the device above its baseline, whoever had it."""

    bytes: int
    mapped: int
    whole: bool
    seconds: float


class Meter:
    """``on_sample`` is the sampler's; ``run`` is a task. ``tell``: the process groups that the sampler is to watch."""

    def __init__(self, device: str, *, counts_mapped: bool, tell: Callable[[Iterable[int]], None]) -> None:
        self._device = device
        self._counts_mapped = counts_mapped
        self._shares = Shares()
        self._tell = tell
        self._leader: int | None = None
        self._news = asyncio.Event()
        self._fault = ""
        self._began = 0.0
        self._own = self._used = self._mapped = 0
        self._told = False
        self._marks = True
        """The kernel's high-water marks began with this phase."""
        self.latest: Reading | None = None
        self.baseline: int | None = None
        """The least that the device had in use without the model."""

    # --- readings -----------------------------------------------------------------------------------------------------

    def on_sample(self, sample: Sample) -> None:
        if self._device == HOST:
            return  # ``run`` reads it more often
        device = sample.devices.get(self._device)
        if device is None or device.fault:
            self._fault = device.fault if device is not None else "it is not there"
            return
        self._take(sample.taken, device)

    async def run(self) -> None:
        """Read the host until cancelled."""
        while self._device == HOST:
            taken = time.monotonic()
            leaders = () if self._leader is None else {self._leader}
            self._take(taken, sample_host(leaders, None, of_tree=self._shares.of_tree))
            await asyncio.sleep(_EVERY)

    def _take(self, taken: float, device: DeviceSample) -> None:
        own = None
        mapped = 0
        if self._leader is not None and device.attributed is not None:
            mapped = device.mapped.get(self._leader, 0)
            own = device.attributed.get(self._leader, 0) + (mapped if self._counts_mapped else 0)
        reading = Reading(taken, device.total - device.free, own, mapped)
        self.latest, self._fault = reading, ""
        if taken >= self._began:
            self._used = max(self._used, reading.used)
            self._mapped = max(self._mapped, mapped)
            self._own = max(self._own, own or 0)
            self._told = self._told or own is not None
        self._news.set()

    async def read(self, after: float | None = None) -> Reading:
        """The first reading that is taken from now on, or after an instant. Raises CannotMeasure."""
        wanted = time.monotonic() if after is None else after
        try:
            async with asyncio.timeout(_SILENCE):
                while self.latest is None or self.latest.taken <= wanted:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            reason = self._fault or "the driver does not answer"
            raise CannotMeasure(f"the memory of {self._device} cannot be read: {reason}") from None
        return self.latest

    # --- phases -------------------------------------------------------------------------------------------------------

    def watch(self, leader: int | None) -> None:
        """Whose bytes count from now on; None: the device's."""
        if leader != self._leader:
            self._leader = leader
            self._marks = leader is not None
            self._tell(() if leader is None else {leader})

    def begin(self) -> None:
        """A phase begins: forget what was."""
        self._began = time.monotonic()
        self._own = self._used = self._mapped = 0
        self._told = False
        if self._exact:
            self._marks = high_water.reset(self._tree())

    async def end(self) -> Peak:
        """The phase's peak, with a reading from after its end. Raises CannotMeasure."""
        seconds = time.monotonic() - self._began
        await self.read()
        above = max(0, self._used - (self.baseline or 0))
        tree = self._tree()
        if self._exact and self._marks and not doubtful(tree):  # else the sum would count what they share several times
            self._own = max(self._own, high_water.high_water(tree))
        # A driver that shows the processes of others only attributes nothing, and yet the bytes are in use.
        hidden = not self._told or (self._own == 0 and self._device != HOST and above > _NOISE)
        whole = self._leader is None or hidden
        return Peak(above if whole else self._own, self._mapped, whole, seconds)

    @property
    def now(self) -> int:
        """For a progress bar: the phase's peak so far."""
        return self._own if self._told else max(0, self._used - (self.baseline or self._used))

    @property
    def _exact(self) -> bool:
        """What counts is all that is resident, of which the kernel keeps the highest."""
        return self._device == HOST and self._counts_mapped and self._leader is not None

    def _tree(self) -> dict[int, Bytes]:
        return {} if self._leader is None else processes.by_process(self._leader)

    # --- between them -------------------------------------------------------------------------------------------------

    async def settle(self, steady: float, limit: float) -> int:
        """Wait until the device's use is back at the baseline, or has not moved for ``steady`` seconds, at most ``limit``:
        the least in use in that time. Raises CannotMeasure.
        """
        began = since = time.monotonic()
        low = high = (await self.read()).used
        while True:
            now = time.monotonic()
            if self.baseline is not None and low <= self.baseline + _BACK:
                return low
            if now - since >= steady or now - began >= limit:
                return low
            used = (await self.read()).used
            low, high = min(low, used), max(high, used)
            if high - low > _NOISE:
                since, low, high = time.monotonic(), used, used

    def note_baseline(self, used: int) -> None:
        """The lowest counts, so that what others give back meanwhile makes no peak smaller."""
        self.baseline = used if self.baseline is None else min(self.baseline, used)
