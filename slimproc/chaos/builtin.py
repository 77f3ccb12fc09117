"""The configuration that ``slimproc chaos`` has when it is given none: fake models that do not fit together."""

from __future__ import annotations

from typing import Any, Final

_MIB: Final = 1 << 20
BROKEN: Final = "broken"
"""The model whose engine always dies while it loads."""


def builtin() -> dict[str, Any]:
    """As a file would have it. Limits are short, so that a minute has room for many faults."""
    return {
        "memory": {"margin": 0, "host_limit": 1000 * _MIB},
        "preload": ["pair", "other"],
        "stall_timeout": 3,
        "cancel_grace": 2,
        "load_timeout": 10,
        "unload_timeout": 5,
        "drain_timeout": 10,
        "request_timeout": 30,
        "queue_timeout": 30,
        "keepalive_after": 2,
        "shutdown_timeout": 5,
        "models": {
            "pair": _fake(300, replicas=2, slots=3, max_queue=6, on_crash="resume", fake={"load_time": 0.1}),
            "other": _fake(350, slots=2, max_queue=4, fake={"load_time": 0.2, "unload_time": 0.1}),
            "large": _fake(700, slots=2, max_queue=4, ttl=3, fake={"load_time": 0.3, "unload_time": 0.1}),
            "stubborn": _fake(400, slots=2, max_queue=4, fake={"ignore_sigterm": True}),
            BROKEN: _fake(100, max_queue=2, fake={"die_in_load": 11, "load_time": 0.1}),
        },
    }


def _fake(megabytes: int, *, fake: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {
        "backend": "fake",
        "context": 65_536,
        "fake": {"bytes": megabytes * _MIB, "ttft": 0.01, "token_latency": 0.005} | fake,
    } | settings
