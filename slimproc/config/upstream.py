"""The parts of a configuration that are about memory, and about models that are not served by engines of ours."""

from __future__ import annotations

from typing import Literal

import msgspec


class MemoryProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A model's ``memory:`` block: what it was measured to need. Bytes. Written by ``slimproc measure``."""

    load_peak: int
    inference_peak: int
    residual: int = 0
    """What stays when it is unloaded."""
    max_concurrency: int = 1
    """Requests at once while it was measured: an upstream's ``concurrency`` cannot be more."""
    profile_id: str = ""
    """For people: where and when."""


class MemoryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The top-level ``memory:`` block."""

    margin: int | None = None
    """Bytes that stay free on each device. None: 1 GiB on a GPU, 5 % of the host's."""
    max_sample_age: float = 5.0
    devices: tuple[str, ...] | None = None
    """The devices that may be used: ``host`` and GPUs by UUID. None: all there are."""
    host_limit: int | None = None
    """Take the host for one with no more memory than this."""


class Remote(msgspec.Struct, frozen=True, kw_only=True):
    """A model's ``remote:`` block: servers that are already there, one replica each."""

    base_urls: tuple[str, ...]
    """The key ``base_url``: one, or a list. Without a trailing slash."""
    contract: Literal["control", "none"] = "control"
    """``none``: no lifecycle; it can serve while ``health_path`` answers 2xx."""
    health_path: str = "/health"
    prepare: tuple[str, ...] = ()
    """``prepare.argv``: run when a load finds nobody at the control endpoint; argv[0] is absolute."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A model's ``command:`` block: a server that we start and stop."""

    argv: tuple[str, ...]
    """``${PORT}`` in any argument, or in a value of ``env``, is the port on 127.0.0.1 that it has to listen on."""
    env: dict[str, str] = {}
    """Beside our own environment."""
    ready_path: str = "/health"
    """It is ready when this answers 2xx."""
