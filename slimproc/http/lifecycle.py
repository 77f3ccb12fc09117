"""Waiting for what an operator asked for: a model in memory, or out of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from slimproc.config import ModelConfig
from slimproc.errors import DeadlineExceeded, InvalidRequest, ModelFailed, UnloadFailed
from slimproc.http.gateway import Gateway
from slimproc.replicas.life import Life
from slimproc.replicas.replica import Replica
from slimproc.replicas.states import ReplicaState
from slimproc.residency.refusals import refusal

_LOOK_EVERY: Final = 0.05
"""Seconds. Operators are few, and residency and replicas need not know of them."""
_SPARE: Final = 5.0
"""Seconds beyond the limits of those who do the work: they tell what went wrong better than a time-out does."""


def wish(gateway: Gateway, model: ModelConfig) -> None:
    """An operator wants it: what was held against its work is forgotten, too."""
    gateway.admission.suspects.clear(model.name)
    gateway.residency.load(model.name)


async def load(gateway: Gateway, model: ModelConfig) -> str:
    """Ask for it and wait until it serves, or has served. Raises ModelFailed, what a refusal is told as, or
    DeadlineExceeded.
    """
    asked = time.monotonic()
    wish(gateway, model)

    def is_loaded() -> bool:
        replicas = gateway.supervisor.of(model.name)  # others than before, after a reload of the configuration
        if any(replica.state is ReplicaState.READY or replica.resident_since >= asked for replica in replicas):
            return True
        if all(_has_failed(replica) for replica in replicas) and any(one.changed_at >= asked for one in replicas):
            reason = next((replica.reason for replica in replicas if replica.reason), "it says no reason")
            raise ModelFailed(f"the model {model.name} could not be loaded: {reason}")
        explanation = gateway.residency.explain(model.name)
        if explanation.verdict == "refuse":
            code = explanation.code
            raise ModelFailed(explanation.reason) if code is None else refusal(code, explanation)
        return False

    limit = gateway.config.drain_timeout + model.prepare_timeout + model.load_timeout + _SPARE
    await _until(is_loaded, limit, f"the model {model.name} is still not loaded")
    return "loaded"


async def unload(gateway: Gateway, model: ModelConfig) -> str:
    """Ask for it and wait until nothing that runs of it now does. Others may have asked for it again by then.

    Raises InvalidRequest, UnloadFailed or DeadlineExceeded.
    """
    if not model.managed:
        raise InvalidRequest(f"{model.name} is a server that nobody loads or unloads", param="id")
    gateway.residency.unload(model.name)
    await asyncio.sleep(0)  # a start from before is heard first, and ends with this
    running = [(replica, replica.life) for replica in gateway.supervisor.of(model.name)]

    def is_unloaded() -> bool:
        ended = [_is_unloaded(replica, life) for replica, life in running]
        return all(ended)

    limit = gateway.config.drain_timeout + model.unload_timeout + _SPARE
    await _until(is_unloaded, limit, f"the model {model.name} is still not unloaded")
    return "unloaded"


def _is_unloaded(replica: Replica, life: Life | None) -> bool:
    """Whether the life has ended. Raises UnloadFailed where what it had may still be in memory."""
    failure = replica.unload_failed
    if replica.state in (ReplicaState.STOPPED, ReplicaState.FAILED):
        failure = replica.remains
    if failure:
        raise UnloadFailed(f"the model {replica.model} could not be unloaded: {failure}")
    return life is None or replica.life is not life


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
