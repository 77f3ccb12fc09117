"""Waiting for what an operator asked for: a model in memory, or out of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Final

from slimproc.config import ModelConfig
from slimproc.errors import DeadlineExceeded, InsufficientMemory, ModelFailed
from slimproc.http.gateway import Gateway
from slimproc.replicas.replica import Replica
from slimproc.replicas.states import ReplicaState

_LOOK_EVERY: Final = 0.05
"""Seconds. Operators are few, and residency and replicas need not know of them."""
_SPARE: Final = 5.0
"""Seconds beyond the limits of those who do the work: they tell what went wrong better than a time-out does."""


async def load(gateway: Gateway, model: ModelConfig) -> str:
    """Ask for it and wait until it serves. Raises ModelFailed, InsufficientMemory or DeadlineExceeded."""
    asked = time.monotonic()
    gateway.admission.clear_quarantine(model.name)
    gateway.residency.load(model.name)

    def is_loaded() -> bool:
        replicas = gateway.supervisor.of(model.name)  # others than before, after a reload of the configuration
        if any(replica.state is ReplicaState.READY for replica in replicas):
            return True
        if all(_has_failed(replica) for replica in replicas) and any(one.changed_at >= asked for one in replicas):
            reason = next((replica.reason for replica in replicas if replica.reason), "it says no reason")
            raise ModelFailed(f"the model {model.name} could not be loaded: {reason}")
        explanation = gateway.residency.explain(model.name)
        if explanation.verdict == "refuse":
            raise InsufficientMemory(explanation.reason, plan=asdict(explanation))
        return False

    limit = gateway.config.drain_timeout + model.prepare_timeout + model.load_timeout + _SPARE
    await _until(is_loaded, limit, f"the model {model.name} is still not loaded")
    return "loaded"


async def unload(gateway: Gateway, model: ModelConfig) -> str:
    """Ask for it and wait until nothing of it runs. Raises DeadlineExceeded."""
    gateway.residency.unload(model.name)
    replicas = gateway.supervisor.of(model.name)

    def is_unloaded() -> bool:
        return all(replica.state in (ReplicaState.STOPPED, ReplicaState.FAILED) for replica in replicas)

    limit = gateway.config.drain_timeout + model.unload_timeout + _SPARE
    await _until(is_unloaded, limit, f"the model {model.name} is still not unloaded")
    return "unloaded"


def _has_failed(replica: Replica) -> bool:
    given_up = replica.state is ReplicaState.FAILED or replica.short_of_memory > 1
    return given_up or (replica.state is ReplicaState.BACKOFF and replica.load_failed)


async def _until(condition: Callable[[], bool], limit: float, otherwise: str) -> None:
    try:
        async with asyncio.timeout(limit):
            await asyncio.sleep(0)  # who was asked has not heard of it yet
            while not condition():  # noqa: ASYNC110 - see _LOOK_EVERY
                await asyncio.sleep(_LOOK_EVERY)
    except TimeoutError:
        raise DeadlineExceeded(f"{otherwise} after {limit:g} s") from None
