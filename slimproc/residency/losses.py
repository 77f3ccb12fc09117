"""What becomes of the models on a GPU that is lost: their engines are ended at once, so that they can be loaded elsewhere."""

from __future__ import annotations

from collections.abc import Iterable

from slimproc.replicas.states import ReplicaState
from slimproc.residency.probes.faults import LOST, in_words
from slimproc.residency.unit import Unit
from slimproc.residency.views import Sample

_ALIVE = (ReplicaState.STARTING, ReplicaState.READY, ReplicaState.DRAINING)


def end_on_lost(units: Iterable[Unit], sample: Sample) -> None:
    """An engine whose GPU is gone fails its next request, or answers nothing for ever; one that waits for its restart
    there would wait in vain. A server that we cannot kill is left alone.
    """
    for unit in units:
        if unit.device is None or unit.retired:
            continue
        here = sample.devices.get(unit.device)
        if here is not None and here.fault != LOST:
            continue
        if unit.replica.state in _ALIVE:
            why = in_words(LOST) if here is not None else "there is no such device any more"
            unit.replica.device_lost(f"{unit.device}: {why}")
        elif unit.replica.state is ReplicaState.BACKOFF:
            unit.replica.ask_stop(0.0)
