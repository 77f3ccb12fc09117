"""Fleet: makes the replicas of every configured model: engines of ours, and servers of others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from slimproc.config import Config, ModelConfig
from slimproc.ipc.credit import default_credit
from slimproc.metrics import Metrics
from slimproc.replicas.limits import EngineLimits, ReplicaLimits
from slimproc.replicas.local import engine_replica
from slimproc.replicas.replica import Replica

if TYPE_CHECKING:
    from slimproc.upstream.replicas import Upstreams


class Fleet:
    """One per server. ``close`` it when every replica has stopped."""

    def __init__(
        self, config: Config, metrics: Metrics, environ: Mapping[str, str], *, on_change: Callable[[Replica], None]
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._environ = environ
        self._on_change = on_change
        self._upstreams: Upstreams | None = None
        self._engine = EngineLimits(
            ring_size=config.ring_size,
            credit=credit_of(config),
            stall_timeout=config.stall_timeout,
            cancel_grace=config.cancel_grace,
            environ=environ,
        )

    def replicas(self, model: ModelConfig, taken: Collection[int] = ()) -> list[Replica]:
        """All replicas of a model, none of which has been started. ``taken``: numbers that others of it still have."""
        free = (index for index in itertools.count() if index not in taken)
        indices = list(itertools.islice(free, model.replicas))
        if model.upstream is not None:
            return self._of_upstream(model, indices)
        return [
            engine_replica(
                index,
                model.engine_settings(),
                limits_of(model),
                self._engine,
                self._metrics.model(model.name),
                on_change=self._on_change,
            )
            for index in indices
        ]

    def _of_upstream(self, model: ModelConfig, indices: list[int]) -> list[Replica]:
        # Here and not above: it imports aiohttp, for which the engines of a server without upstreams need not wait.
        from slimproc.upstream.replicas import UpstreamLimits, Upstreams  # noqa: PLC0415

        if self._upstreams is None:
            self._upstreams = Upstreams(self._environ)
        assert model.upstream is not None
        limits = UpstreamLimits(
            concurrency=model.concurrency,
            load_timeout=model.load_timeout,
            unload_timeout=model.unload_timeout,
            prepare_timeout=model.prepare_timeout,
            status_timeout=self._config.status_timeout,
        )
        metrics = self._metrics.model(model.name)
        return self._upstreams.replicas(
            model.name, model.upstream, limits, metrics, on_change=self._on_change, indices=indices
        )

    async def close(self) -> None:
        """Let go of the servers of others."""
        if self._upstreams is not None:
            await self._upstreams.close()


def limits_of(model: ModelConfig) -> ReplicaLimits:
    """Who is asked by HTTP keeps its own limit of a load: nobody could kill it at the replica's."""
    return ReplicaLimits(model.load_timeout if model.remote is None else None, model.unload_timeout)


def credit_of(config: Config) -> str:
    """What rings are published through."""
    return default_credit() if config.credit == "auto" else config.credit
