"""The configuration as the rest of slimproc sees it: frozen, complete, every value parsed and in range.

A field's ``Annotated`` kind is what the key accepts, its default what the key means when it is absent. To add a
setting, add a field here, a row to docs/configuration.md and a line to config.example.yaml; tests hold the three together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec

from slimproc.config.problems import clip
from slimproc.config.runtime import RuntimeDirectory
from slimproc.config.upstream import Command, MemoryPolicy, MemoryProfile, Remote
from slimproc.config.values import (
    BOOLEAN,
    GIB,
    KIB,
    LISTEN,
    MIB,
    NAME,
    NAMES,
    PATH,
    SOCKET_PATH,
    TEXT,
    Kind,
    Listen,
    choice,
    integer,
    seconds,
    size,
)
from slimproc.errors import InvalidRequest, ModelNotFound
from slimproc.settings import EngineSettings, FakeSettings

ANY_NAME = "*"
"""The alias under which a model answers to any name that no other model has."""

LATER = frozenset({"preload", "order", "queue_timeout", "prepare_timeout", "status_timeout", "memory"})
LATER_OF_MODEL = frozenset(
    {"remote", "command", "memory", "pin", "ttl", "min_resident", "device", "inference_path", "max_body"}
    | {"contract", "base_url", "concurrency", "prepare", "prepare_timeout", "status_timeout", "queue_timeout"}
)
"""Keys of the design that this version refuses by name rather than as unknown."""

FAKE_KINDS: dict[str, Kind[Any]] = {
    "ttft": seconds(zero=True),
    "token_latency": seconds(zero=True),
    "load_time": seconds(zero=True),
    "load_error": TEXT,
    "die_in_load": integer(1, 64),
    "ignore_sigterm": BOOLEAN,
    "hang_in_unload": BOOLEAN,
    "unload_time": seconds(zero=True),
    "bytes": size(0, 1 << 50),
}

Seconds = Annotated[float, seconds()]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One entry under ``models:``, served by engines of ours."""

    name: str
    """The entry's own name: what callers say, what metrics and logs are labelled with."""
    display_name: Annotated[str, NAME] = ""
    """The key ``name``: shown in the list of models and nowhere else. As parsed never empty: it defaults to the name."""
    backend: Annotated[Literal["llama_cpp", "mlx", "fake"], choice("llama_cpp", "mlx", "fake")]
    path: Annotated[str | None, PATH] = None
    """A specification for model_path.resolve; an ordinary path is absolute by now."""
    aliases: Annotated[tuple[str, ...], NAMES] = ()
    unlisted: Annotated[bool, BOOLEAN] = False
    replicas: Annotated[int, integer(1, 64)] = 1
    slots: Annotated[int, integer(1, 256)] = 4
    context: Annotated[int | None, integer(8, 1 << 24)] = None
    threads: Annotated[int | None, integer(1, 1024)] = None
    gpu_layers: Annotated[int | None, integer(0, 10_000)] = None
    pooling: Annotated[Literal["mean", "cls", "last"] | None, choice("mean", "cls", "last")] = None
    """llama_cpp only. None: the file decides whether the model makes vectors, and how."""
    max_queue: Annotated[int, integer(0, 1_000_000)] = 32
    """Requests (not sequences) that may wait for this model. 0: only what can start at once is taken."""
    max_tokens_limit: Annotated[int | None, integer(1, 1 << 24)] = None
    request_timeout: Seconds = 120.0
    load_timeout: Seconds = 120.0
    unload_timeout: Seconds = 30.0
    """The three as parsed: the model's own, else the top-level value."""
    chat_template: Annotated[Path | None, PATH] = None
    """A file that takes the place of the model's own template. It could be read with the configuration."""
    fake: FakeSettings = FakeSettings()
    origins: dict[str, str] = {}
    """Where each key was given; a key that is not in it was not given for this model."""

    def engine_settings(self) -> EngineSettings:
        """What each of this model's engines is started with."""
        return EngineSettings(
            model=self.name,
            backend=self.backend,
            path=self.path,
            slots=self.slots,
            context=self.context,
            threads=self.threads,
            gpu_layers=self.gpu_layers,
            pooling=self.pooling,
            fake=self.fake,
        )


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The whole configuration. Times in seconds, sizes in bytes. Made by ``load_config``."""

    models: dict[str, ModelConfig]
    """By name, in the order of the file; never empty."""
    default_model: Annotated[str | None, NAME] = None
    """A name in ``models``; the only one where there is only one; else None: callers must name theirs."""
    listen: Annotated[Listen, LISTEN] = Listen()
    admin_socket: Annotated[Path | None, SOCKET_PATH] = None
    """None: see ``admin_socket_for``."""
    state_dir: Annotated[Path, PATH]
    log_level: Annotated[Literal["debug", "info", "warning", "error"], choice("debug", "info", "warning", "error")] = (
        "info"
    )
    log_json: Annotated[bool, BOOLEAN] = False
    while_loading: Annotated[Literal["wait", "refuse"], choice("wait", "refuse")] = "wait"
    max_queue_total: Annotated[int, integer(0, 1_000_000)] = 256
    request_timeout: Seconds = 120.0
    load_timeout: Seconds = 120.0
    unload_timeout: Seconds = 30.0
    shutdown_timeout: Seconds = 10.0
    drain_timeout: Seconds = 180.0
    stall_timeout: Seconds = 30.0
    cancel_grace: Seconds = 5.0
    keepalive_after: Seconds = 15.0
    body_timeout: Seconds = 10.0
    """To send a body, beside the time that its bytes have at 64 KiB/s."""
    max_json_body: Annotated[int, size(KIB, GIB)] = 4 * MIB
    ring_size: Annotated[int, size(64 * KIB, GIB, power_of_two=True)] = MIB
    credit: Annotated[Literal["auto", "eventfd", "pipe"], choice("auto", "eventfd", "pipe")] = "auto"
    runtime: RuntimeDirectory
    """Where the admin socket goes unless ``admin_socket`` says so."""
    origins: dict[str, str] = {}
    """Where each top-level key was given; a key that is not in it has its default."""

    def admin_socket_for(self, port: int) -> Path:
        """The admin socket of the server that listens on ``port`` (the one bound, where ``listen`` says 0)."""
        return self.admin_socket or self.runtime.socket_for(port)

    def resolve_model(self, name: str | None) -> ModelConfig:
        """The model that a caller means: by name, then alias, then ``*``, all exact; the default for None and "".

        Raises ModelNotFound, or InvalidRequest where no name was given and there is no default.
        """
        if not name:
            if self.default_model is None:
                raise InvalidRequest("this server has several models and no default: name one", param="model")
            return self.models[self.default_model]
        if name in self.models:
            return self.models[name]
        for wanted in (name, ANY_NAME):
            for model in self.models.values():
                if wanted in model.aliases:
                    return model
        raise ModelNotFound(
            f"there is no model {clip(name)!r} here; GET /v1/models lists those there are", param="model"
        )

    def origin(self, key: str) -> str:
        """Where a value came from: ``listen``, or ``models.NAME.KEY``. Raises KeyError for what is no setting."""
        if key in KINDS:
            return self.origins.get(key, "default")
        for model in self.models.values():
            own = key.removeprefix(f"models.{model.name}.")
            if own != key and (own in MODEL_KINDS or own == "fake"):
                return model.origins.get(own) or (self.origin(own) if own in KINDS else "default")
        raise KeyError(key)


def _kinds(struct: type[msgspec.Struct]) -> dict[str, Kind[Any]]:
    """The kind of each key of ``struct``, by the name that the file uses."""
    found = {}
    for field, hint in get_type_hints(struct, include_extras=True).items():
        for extra in get_args(hint)[1:]:
            if isinstance(extra, Kind):
                found["name" if field == "display_name" else field] = extra
    return found


KINDS = _kinds(Config)
MODEL_KINDS = _kinds(ModelConfig)
