"""NVIDIA GPUs through NVML: the only file that knows pynvml. The front never loads it, since a driver can hang its caller."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import pynvml

from slimproc.residency.probes.faults import LOST, MISMATCH, UNKNOWN
from slimproc.residency.probes.lines import ABSENT, clip
from slimproc.residency.probes.processes import Trees
from slimproc.residency.views import DeviceSample

_LOOK_AGAIN: Final = 60.0
"""Seconds until a missing driver, new MIG instances or a faulty GPU are looked for again."""
_NO_DRIVER: Final = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
_INTEGRATED: Final = frozenset({"gb10", "orin", "thor", "xavier", "tegra"})
"""Words in the names of GPUs whose memory is the machine's."""
_LISTS: Final = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3")


class NeedsNewProcess(Exception):
    """What is wrong can only be right in a process that loads the library anew."""


class _Refused(Exception):
    """A call failed. ``code`` is an nvmlReturn_t; None: pynvml itself could not (a function that the driver lacks, a
    name that is no text).
    """

    def __init__(self, code: int | None, text: str) -> None:
        super().__init__(text)
        self.code = code

    @property
    def fault(self) -> str:
        if self.code == pynvml.NVML_ERROR_GPU_IS_LOST:
            return LOST
        if self.code == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
            return MISMATCH
        return clip(f"{UNKNOWN}: {self}")


@dataclass
class _Device:
    """A GPU, or one MIG instance of it."""

    handle: Any
    index: int
    uuid: str
    name: str
    total: int = 0
    """As last seen."""
    fault: str = ""
    strangers: set[int] = field(default_factory=set)
    """Processes in its list, when last seen, that do not exist for us."""


@dataclass
class Reading:
    """See ``lines.Line``."""

    devices: dict[str, DeviceSample] = field(default_factory=dict)
    driver: str = ""
    unnamed: dict[int, str] = field(default_factory=dict)


class Gpus:
    """All GPUs, in the order of the PCI bus. ``anew``: another process has just failed over a version mismatch."""

    def __init__(self, *, anew: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._anew = anew
        self._clock = clock
        self._driver = ABSENT
        self._look_at = clock()
        self._ends_at: float | None = None
        self._devices: list[_Device] = []
        self._unnamed: dict[int, str] = {}

    def sample(self, trees: Trees, host: DeviceSample) -> Reading:
        """What every GPU says now. Raises NeedsNewProcess and nothing else; what a GPU refuses is its fault."""
        now = self._clock()
        if self._ends_at is not None and now >= self._ends_at:
            raise NeedsNewProcess
        if now >= self._look_at:
            self._look_at = now + _LOOK_AGAIN
            self._look()
        devices = {device.uuid: self._sample(device, trees, host) for device in self._devices}
        self._limit_life(now)
        return Reading(devices, self._driver, self._unnamed)

    def _limit_life(self, now: float) -> None:
        """Only a new process sees whether a GPU that was lost, or a driver that did not fit, is well again."""
        if self._driver in ("", ABSENT) and not self._unnamed and not any(device.fault for device in self._devices):
            self._ends_at = None
        elif self._ends_at is None:
            self._ends_at = now + _LOOK_AGAIN

    # --- who is there ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        if self._driver:
            self._initialize()
        elif self._ends_at is not None:
            return  # while something is wrong, what is known of it stays
        if not self._driver:
            try:
                self._enumerate()
            except _Refused as error:
                self._driver = self._fault_of(error)

    def _initialize(self) -> None:
        try:
            _call("nvmlInit")
        except _Refused as error:
            self._driver = ABSENT if error.code in _NO_DRIVER else self._fault_of(error)
        else:
            self._driver, self._anew = "", False

    def _enumerate(self) -> None:
        devices: list[_Device] = []
        self._unnamed = {}
        for index in range(_call("nvmlDeviceGetCount")):
            try:
                for handle in _parts(_call("nvmlDeviceGetHandleByIndex", index)):
                    name = clip(_call("nvmlDeviceGetName", handle))
                    devices.append(_Device(handle, index, _uuid(handle), name))  # one by one: the next may fail
            except _Refused as error:
                self._unnamed[index] = self._fault_of(error)
        self._devices = devices

    # --- what they say --------------------------------------------------------------------------------------------

    def _sample(self, device: _Device, trees: Trees, host: DeviceSample) -> DeviceSample:
        kind, attributed, free = "gpu", None, 0
        if device.fault != LOST:  # which stays as it is until another process has seen the GPU well
            try:
                device.fault = ""
                kind, device.total, free = _memory(device, host)
                attributed = _attributed(device, trees)
            except _Refused as error:
                device.fault = self._fault_of(error)
                free = 0
        return DeviceSample(
            kind="unified" if kind == "unified" else "gpu",
            name=device.name,
            total=device.total,
            free=max(0, min(free, device.total)),
            attributed=attributed,
            fault=device.fault,
            index=device.index,
        )

    def _fault_of(self, error: _Refused) -> str:
        if error.code == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH and not self._anew:
            raise NeedsNewProcess from error
        return error.fault


def _uuid(handle: Any) -> str:
    uuid: str = _call("nvmlDeviceGetUUID", handle)
    if not uuid or not uuid.isascii() or not uuid.isprintable() or uuid != clip(uuid):
        raise _Refused(None, f"{uuid[:40]!r} is no UUID")
    return uuid


def _parts(gpu: Any) -> Iterator[Any]:
    """The GPU itself, or in MIG mode its instances: what the whole one says holds for nobody then."""
    mig = 0
    with contextlib.suppress(_Refused):  # most cannot be divided, and say so by an error
        mig = _call("nvmlDeviceGetMigMode", gpu)[0]
    if not mig:
        yield gpu
        return
    for place in range(_call("nvmlDeviceGetMaxMigDeviceCount", gpu)):
        try:
            yield _call("nvmlDeviceGetMigDeviceHandleByIndex", gpu, place)
        except _Refused as error:
            if error.code != pynvml.NVML_ERROR_NOT_FOUND:
                raise


def _memory(device: _Device, host: DeviceSample) -> tuple[str, int, int]:
    """Kind, total and free. Never ``used``: drivers disagree on what it counts. A GPU that has no memory of its own
    answers that this is not supported, and then the host's is what it can use. Some of them tell numbers all the same:
    those are known by name, and the smaller number counts. (NVML has no question for it, so that one of another name
    is taken for a GPU with memory of its own.)
    """
    try:
        memory = _call("nvmlDeviceGetMemoryInfo", device.handle)
    except _Refused as error:
        if error.code != pynvml.NVML_ERROR_NOT_SUPPORTED:
            raise
        return "unified", host.total, host.free
    total, free = int(memory.total), int(memory.free)
    if total == 0:
        return "unified", host.total, host.free
    if _INTEGRATED & set(re.split(r"[^a-z0-9]+", device.name.lower())):
        return "unified", min(total, host.total), min(free, host.free)
    return "gpu", total, free


def _attributed(device: _Device, trees: Trees) -> dict[int, int] | None:
    """Bytes by leader. None where it cannot be told whose they are: no list, no bytes in it, or the numbers of processes
    of another namespace (containers).
    """
    held: dict[int, int | None] = {}
    for place, function in enumerate(_LISTS):
        try:
            processes = _call(function, device.handle)
        except _Refused as error:
            if error.code == pynvml.NVML_ERROR_GPU_IS_LOST:
                raise
            if place == 0:
                return None
            continue
        for process in processes:
            # Whoever computes and draws is in both lists, with the same bytes.
            held[process.pid] = process.usedGpuMemory
    sums: dict[int, int] = {}
    strangers = set()
    for pid, size in held.items():
        leader = trees.leader_of.get(pid) or _session(pid)
        if leader is None:
            strangers.add(pid)
        if leader not in trees.leaders:
            continue
        assert leader is not None
        if size is None or size > device.total:
            return None
        sums[leader] = sums.get(leader, 0) + size
    before, device.strangers = device.strangers, strangers
    if strangers and len(strangers) == len(held) and strangers & before:
        return None  # one that has just ended is a stranger for one sample at most
    return sums


def _session(pid: int) -> int | None:
    """Its session, which is named after its leader. None: there is no such process here."""
    try:
        return os.getsid(pid) if pid > 0 else None
    except (OSError, OverflowError):
        return None


def _call(function: str, *arguments: Any) -> Any:
    """Raises _Refused for whatever goes wrong: pynvml's errors have two unrelated bases, and its texts may be no text."""
    try:
        return getattr(pynvml, function)(*arguments)
    except pynvml.NVMLError as error:
        raise _Refused(error.value, str(error)) from None
    except Exception as error:  # noqa: BLE001  # a foreign library at its border
        raise _Refused(None, f"{type(error).__name__}: {error}") from None
