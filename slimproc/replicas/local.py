"""Replicas whose lives are engines of ours."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from slimproc import model_path
from slimproc.errors import LoadFailed
from slimproc.metrics import ModelMetrics
from slimproc.replicas.incarnation import Incarnation
from slimproc.replicas.life import Life, Post, Sighting
from slimproc.replicas.limits import EngineLimits, ReplicaLimits
from slimproc.replicas.replica import Replica
from slimproc.replicas.restart import RestartPolicy
from slimproc.settings import EngineSettings


class EngineSource:
    """Makes the engines of one replica. Nothing of an engine outlives it."""

    sighting: Sighting | None = None

    def __init__(
        self, name: str, replica: int, settings: EngineSettings, limits: EngineLimits, metrics: ModelMetrics
    ) -> None:
        self.slots = settings.slots
        self._name = name
        self._replica = replica
        self._settings = settings
        self._limits = limits
        self._metrics = metrics

    def start(
        self, *, device: str | None, post: Post, on_slot_free: Callable[[], None], on_news: Callable[[], None]
    ) -> Life:
        """Spawn one. Raises OSError, and then nothing is left over."""
        del on_news  # it has none
        return Incarnation(
            self._name,
            self._replica,
            self._settings,
            self._limits,
            self._metrics,
            post=post,
            on_slot_free=on_slot_free,
            device=device,
        )

    def made_from(self) -> Hashable:
        """The model's files: which they are, how large and how old."""
        specs = (self._settings.path, *(adapter.path for adapter in self._settings.lora))
        return tuple(_seen(spec, self._limits.environ) for spec in specs if spec is not None)

    async def watch(self, on_news: Callable[[], None]) -> None:
        """There is nothing to see between two engines."""


def _seen(spec: str, environ: Mapping[str, str]) -> tuple[str, int, int, int] | None:
    """None: there is no such file."""
    try:
        path = model_path.resolve(spec, environ)
        found = path.stat()
    except (LoadFailed, OSError):
        return None
    return str(path), found.st_ino, found.st_size, found.st_mtime_ns


def engine_replica(
    index: int,
    settings: EngineSettings,
    limits: ReplicaLimits,
    engine: EngineLimits,
    metrics: ModelMetrics,
    *,
    on_change: Callable[[Replica], None],
    policy: RestartPolicy | None = None,
) -> Replica:
    """The replica ``index`` of the model that ``settings`` name."""
    source = EngineSource(f"{settings.model}/{index}", index, settings, engine, metrics)
    return Replica(settings.model, index, source, limits, metrics, on_change=on_change, policy=policy)
