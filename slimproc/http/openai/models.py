"""``GET /v1/models`` and ``/v1/models/{id}``: OpenAI's list, with what callers of several local models ask for."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from slimproc.config import ModelConfig
from slimproc.errors import ModelNotFound
from slimproc.http.gateway import Gateway
from slimproc.replicas.states import ReplicaState

_LOADING = frozenset({ReplicaState.STARTING, ReplicaState.KILLING, ReplicaState.BACKOFF})


def routes(gateway: Gateway) -> list[web.RouteDef]:
    async def list_models(_: web.Request) -> web.Response:
        listed = [model for model in gateway.config.models.values() if not model.unlisted]
        return _json({"object": "list", "data": [describe(gateway, model) for model in listed]})

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
    has been ready, since the model's file says them.
    """
    engines = [replica.engine for replica in gateway.supervisor.of(model.name)]
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
        "gpu": None,
        "gpus": [],
        "status": {"value": status(gateway, model.name)},
    }


def status(gateway: Gateway, model: str) -> str:
    """In the words that model routers share: loaded, loading, failed or unloaded."""
    states = {replica.state for replica in gateway.supervisor.of(model)}
    if ReplicaState.READY in states or ReplicaState.DRAINING in states:
        return "loaded"
    if states & _LOADING:
        return "loading"
    return "failed" if ReplicaState.FAILED in states else "unloaded"


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
