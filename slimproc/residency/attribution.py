"""Attribution: whether a GPU's driver says whose its bytes are. Where it does not, what is ours is taken off twice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from slimproc import logs
from slimproc.replicas.states import ReplicaState
from slimproc.residency.unit import Unit
from slimproc.residency.views import HOST, Sample

log = logs.get("slimproc.residency")

_SETTLED: Final = 2.0
"""Seconds after a model became ready in which a sample must have shown its bytes."""
_HINT: Final = (
    "its models are taken for larger than they are, and fewer fit together; "
    "in a container, start it with --pid=host, since a driver numbers processes as the host does"
)


class Attribution:
    """Tells of it, once for each device."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def look(self, units: Iterable[Unit], sample: Sample) -> None:
        """A model that has been in memory for a while has bytes, or the driver does not tell them."""
        for unit in units:
            device, leader, replica = unit.device, unit.replica.pid, unit.replica
            if device is None or device == HOST or device in self._told or leader is None:
                continue
            seen = sample.devices.get(device)
            settled = replica.state is ReplicaState.READY and sample.taken > replica.resident_since + _SETTLED
            if seen is None or seen.fault or not settled or not unit.claim.peak:
                continue
            if not (seen.attributed or {}).get(leader):
                self._told.add(device)
                log.warning("the driver does not say whose a GPU's bytes are", device=device, hint=_HINT)
