"""``GET /v1/models`` and ``/v1/models/{id}``: OpenAI's list, with what callers of several local models ask for."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from aiohttp import web

from slimproc.config import ModelConfig
from slimproc.errors import ModelNotFound
from slimproc.http.gateway import Gateway
from slimproc.http.status import describe_status
from slimproc.residency.views import DeviceReport


def routes(gateway: Gateway) -> list[web.RouteDef]:
    async def list_models(_: web.Request) -> web.Response:
        listed = [model for model in gateway.config.models.values() if not model.unlisted]
        gpus = [describe_device(device) for device in gateway.residency.devices() if device.kind != "host"]
        return _json({
            "object": "list",
            "queue_depth": sum(gateway.admission.queue_depths().values()),
            "gpu": gpus[0] if gpus else None,
            "gpus": gpus,
            "data": [describe(gateway, model) for model in listed],
        })  # fmt: skip

    async def get_model(http: web.Request) -> web.Response:
        name = http.match_info["id"]
        model = gateway.config.resolve_model(name)
        if name != model.name and name not in model.aliases:
            raise ModelNotFound(f"there is no model {name[:100]!r} here; GET /v1/models lists those there are")
        return _json(describe(gateway, model))

    return [
        web.get("/v1/models", list_models),
        web.get("/v1/models/{id:(?s:.+)}", get_model),
    ]


def describe(gateway: Gateway, model: ModelConfig) -> dict[str, Any]:
    """One entry of the list. ``context_length`` is per sequence; it and ``capabilities`` are null until a replica
    has been ready, since the model's file says them, and for what is not ours.
    """
    replicas = gateway.supervisor.of(model.name)
    engines = [replica.engine for replica in replicas]
    ready = next((engine.ready for engine in engines if engine is not None and engine.ready is not None), None)
    context = ready.model.context if ready else None
    return {
        "id": model.name,
        "object": "model",
        "created": gateway.started,
        "owned_by": "slimproc",
        "name": model.display_name,
        "aliases": list(model.aliases),
        "context_length": context,
        "max_model_len": context,
        "capabilities": ready.model.capabilities if ready else None,
        "queue_depth": gateway.admission.queue_depths()[model.name],
        "status": describe_status(replicas, gateway.residency.held(model.name)),
    }


def describe_device(device: DeviceReport) -> dict[str, Any]:
    """One entry of ``gpus``. Bytes."""
    return {
        "id": device.id,
        "name": device.name,
        "observed_at": rfc3339(time.time_ns() - round((time.monotonic() - device.taken) * 1e9)),
        "fresh": device.fresh,
        "total": device.total,
        "free": device.free,
        "available": device.available,
        "held": device.held,
        "fault": device.fault or None,
    }


def rfc3339(nanoseconds: int) -> str:
    """An instant of the wall clock, in nanoseconds since 1970, in UTC."""
    seconds, rest = divmod(nanoseconds, 10**9)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest:09d}Z"


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
