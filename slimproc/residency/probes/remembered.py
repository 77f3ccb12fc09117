"""RememberedGpus: which GPUs there are, also when the driver is in no state to say so."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from slimproc import logs
from slimproc.residency.probes.faults import in_words
from slimproc.residency.probes.lines import ABSENT, Line
from slimproc.residency.views import HOST, DeviceSample

log = logs.get("slimproc.probe")

SILENT: Final = "unknown: the memory probe does not answer"
_VANISHED: Final = "unknown: the driver is not loaded any more"


class RememberedGpus:
    """A GPU that was seen once is not forgotten because the driver fails: it is there with a fault, and so nothing is
    quietly loaded somewhere else. It is forgotten when a driver that works does not list it.
    """

    def __init__(self) -> None:
        self._known: dict[str, DeviceSample] = {}
        self._faults: dict[str, str] = {}
        self._told: str | None = None
        self.driver: str | None = None
        """Of the last line: what it says of the driver; also a fault when there is a GPU that has never been named."""

    def devices_of(self, line: Line) -> dict[str, DeviceSample]:
        """All devices at the instant of ``line``, in the driver's order; it is remembered."""
        host = line.devices[HOST]
        devices = {uuid: self._as_known(uuid, device, host) for uuid, device in line.devices.items()}
        driver = _VANISHED if line.driver == ABSENT and self._known else line.driver
        if driver:
            devices |= {uuid: _with(gpu, driver, host) for uuid, gpu in self._known.items() if uuid not in devices}
        for uuid, gpu in self._known.items():
            if gpu.index in line.unnamed and uuid not in devices:
                devices[uuid] = _with(gpu, line.unnamed[gpu.index], host)
        self._known = {uuid: device for uuid, device in devices.items() if uuid != HOST}
        numbers = {gpu.index for gpu in self._known.values()}
        strangers = [
            f"GPU {index} does not tell its UUID ({fault})"
            for index, fault in line.unnamed.items()
            if index not in numbers
        ]
        self.driver = driver or (f"unknown: {strangers[0]}" if strangers else "")
        self._tell(line)
        return devices

    def _as_known(self, uuid: str, device: DeviceSample, host: DeviceSample) -> DeviceSample:
        """A GPU with a fault says less of itself than it did before: it is still what it was."""
        known = self._known.get(uuid)
        return _with(known, device.fault, host) if known is not None and device.fault else device

    def silent(self, host: DeviceSample) -> dict[str, DeviceSample]:
        """All GPUs, at an instant when nobody says anything about them; ``host`` is the host at that instant."""
        self._tell_faults(dict.fromkeys(self._known, SILENT))
        return {uuid: _with(gpu, SILENT, host) for uuid, gpu in self._known.items()}

    # --- what people are told, once a change -----------------------------------------------------------------------

    def _tell(self, line: Line) -> None:
        if line.driver != self._told:
            if line.driver == ABSENT and self._told is None:
                log.info("no NVIDIA driver: there is only the host's memory")
            elif line.driver:
                log.warning(
                    "the NVIDIA driver does not answer: nothing is loaded on a GPU", fault=in_words(line.driver)
                )
            elif self._told is not None:
                log.info("the NVIDIA driver answers", gpus=len(line.devices) - 1)
            self._told = line.driver
        faults = {f"GPU {index}": fault for index, fault in line.unnamed.items()}
        self._tell_faults(faults | {uuid: gpu.fault for uuid, gpu in self._known.items() if gpu.fault})

    def _tell_faults(self, faults: dict[str, str]) -> None:
        for device, fault in faults.items():
            if self._faults.get(device) != fault:
                log.warning("nothing is loaded on this GPU", device=device, fault=in_words(fault))
        for device in self._faults.keys() - faults.keys():
            log.info("nothing is wrong with this GPU any more", device=device)
        self._faults = faults


def _with(gpu: DeviceSample, fault: str, host: DeviceSample) -> DeviceSample:
    """Nobody knows what is free on it; but of memory that it shares with the host, the host's word is enough."""
    free, total = (host.free, host.total) if gpu.kind == "unified" else (0, gpu.total)
    return replace(gpu, total=total, free=free, attributed=None, fault=fault)
