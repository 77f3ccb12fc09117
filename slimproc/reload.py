"""What differs between two configurations, as far as a server that runs is concerned: values, and nothing is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from slimproc.config import Config, ModelConfig

RESTART: Final = (
    "listen", "admin_socket", "state_dir", "max_json_body", "status_timeout", "stall_timeout", "cancel_grace", "ring_size",
    "credit", "runtime",
)  # fmt: skip
"""Top-level settings that sockets, routes and engines are made with."""
RESTART_MEMORY: Final = ("devices", "host_limit")
"""The same of the ``memory`` block."""
IN_PLACE: Final = frozenset(
    {
        "display_name", "aliases", "unlisted", "max_queue", "inference_path", "request_timeout", "pin", "ttl", "min_resident",
        "max_tokens_limit", "chat_template", "max_body", "on_crash",
    }
)  # fmt: skip
"""Settings of a model that no running replica was made with. Any other one that differs replaces its replicas."""
_LIMITS: Final = frozenset({"load_timeout", "unload_timeout", "prepare_timeout"})
"""The same, except for a remote model, whose servers are asked with them."""
_BESIDE: Final = frozenset({"models", "origins"})


@dataclass(frozen=True)
class Difference:
    """Names of models and of settings, in the order of the configurations. ``config`` is the one to run with: the new one,
    with the old values of what needs a restart.
    """

    config: Config
    added: tuple[str, ...]
    removed: tuple[str, ...]
    replaced: tuple[str, ...]
    """Their replicas have to be made anew."""
    changed: tuple[str, ...]
    """They go on with the same replicas and other settings."""
    settings: tuple[str, ...]
    """Top-level settings that apply from now on."""
    restart: tuple[str, ...]
    """Settings whose new values would need a restart."""


def compare(old: Config, new: Config) -> Difference:
    """How to come from ``old``, which is in force, to ``new``."""
    restart = [key for key in RESTART if getattr(old, key) != getattr(new, key)]
    kept = {key: getattr(old, key) for key in restart}
    still = [key for key in RESTART_MEMORY if getattr(old.memory, key) != getattr(new.memory, key)]
    kept["memory"] = msgspec.structs.replace(new.memory, **{key: getattr(old.memory, key) for key in still})
    config = msgspec.structs.replace(new, **kept)
    both = [name for name in new.models if name in old.models]
    replaced = [name for name in both if needs_new_replicas(old.models[name], new.models[name])]
    return Difference(
        config=config,
        added=tuple(name for name in new.models if name not in old.models),
        removed=tuple(name for name in old.models if name not in new.models),
        replaced=tuple(replaced),
        changed=tuple(name for name in both if name not in replaced and _differing(old.models[name], new.models[name])),
        settings=tuple(
            key for key in Config.__struct_fields__ if key not in _BESIDE and getattr(old, key) != getattr(config, key)
        ),
        restart=(*restart, *(f"memory.{key}" for key in still)),
    )


def needs_new_replicas(old: ModelConfig, new: ModelConfig) -> bool:
    """Whether what runs for ``old`` cannot serve ``new``."""
    free = IN_PLACE if old.remote is not None else IN_PLACE | _LIMITS
    return any(key not in free for key in _differing(old, new))


def _differing(old: ModelConfig, new: ModelConfig) -> list[str]:
    """The settings that differ, wherever they were given."""
    keys = (key for key in ModelConfig.__struct_fields__ if key not in _BESIDE)
    return [key for key in keys if getattr(old, key) != getattr(new, key)]
