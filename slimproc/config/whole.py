"""The whole configuration as the rest of slimproc sees it. How a setting is added: see ``model.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from slimproc.config.lists import MODEL_NAMES
from slimproc.config.model import ANY_NAME, MODEL_BLOCKS, MODEL_KINDS, ModelConfig, Seconds
from slimproc.config.problems import clip
from slimproc.config.runtime import RuntimeDirectory
from slimproc.config.upstream import MemoryPolicy
from slimproc.config.values import (
    BOOLEAN,
    GIB,
    KIB,
    LISTEN,
    MIB,
    NAME,
    PATH,
    SOCKET_PATH,
    Listen,
    choice,
    integer,
    kinds_of,
    size,
)
from slimproc.errors import InvalidRequest, ModelNotFound

MAX_QUEUE_TOTAL = 256
"""The default, which is also that of an upstream's own ``max_queue``."""


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
    preload: Annotated[tuple[str, ...] | None, MODEL_NAMES] = None
    """Models that are loaded at the start, in this order. None: every local one as far as they fit together."""
    order: Annotated[Literal["fair", "strict"], choice("fair", "strict")] = "fair"
    """fair: a request may pass an older one that it cannot delay."""
    memory: MemoryPolicy = MemoryPolicy()
    while_loading: Annotated[Literal["wait", "refuse"], choice("wait", "refuse")] = "wait"
    max_queue_total: Annotated[int, integer(0, 1_000_000)] = MAX_QUEUE_TOTAL
    queue_timeout: Seconds = 180.0
    """On ``/infer``: from a request's arrival until it is forwarded."""
    request_timeout: Seconds = 120.0
    load_timeout: Seconds = 120.0
    unload_timeout: Seconds = 30.0
    prepare_timeout: Seconds = 60.0
    status_timeout: Seconds = 5.0
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
    confine: Annotated[Literal["auto", "strict", "jit", "off"], choice("auto", "strict", "jit", "off")] = "auto"
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
        if key in KINDS or key == "memory":
            return self.origins.get(key, "default")
        for model in self.models.values():
            own = key.removeprefix(f"models.{model.name}.")
            if own != key and (own in MODEL_KINDS or own in MODEL_BLOCKS):
                return model.origins.get(own) or (self.origin(own) if own in KINDS else "default")
        raise KeyError(key)


KINDS = kinds_of(Config)
