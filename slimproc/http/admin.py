"""The admin application: for a unix socket that only its owner may open, never for the public listener."""

from __future__ import annotations

from dataclasses import asdict

import msgspec
from aiohttp import web

from slimproc.config import ModelConfig
from slimproc.errors import InvalidRequest, ModelNotFound
from slimproc.http import lifecycle
from slimproc.http.gateway import Gateway
from slimproc.http.openai.models import describe
from slimproc.replicas.replica import Replica


def routes(gateway: Gateway) -> list[web.RouteDef]:
    def model_of(http: web.Request) -> ModelConfig:
        name = http.match_info["id"]
        if name in gateway.config.models:
            return gateway.config.models[name]
        owners = [model.name for model in gateway.config.models.values() if name in model.aliases]
        hint = f"; it is an alias of {owners[0]!r}" if owners else ""
        raise ModelNotFound(f"no model is configured as {name[:100]!r}{hint}", param="id")

    async def models(_: web.Request) -> web.Response:
        found = [
            describe(gateway, model) | {"replicas": [_describe(replica) for replica in gateway.supervisor.of(name)]}
            for name, model in gateway.config.models.items()
        ]
        return _json({"models": found})

    async def replicas(_: web.Request) -> web.Response:
        return _json({"replicas": [_describe(replica) for replica in gateway.supervisor]})

    async def plan(http: web.Request) -> web.Response:
        model = gateway.config.resolve_model(http.query.get("model"))
        return _json(asdict(gateway.residency.explain(model.name)))

    async def load(http: web.Request) -> web.Response:
        model = model_of(http)
        if _wants_to_wait(http):
            return _json({"status": await lifecycle.load(gateway, model)})
        lifecycle.wish(gateway, model)
        return _json({"status": "asked"}, status=202)

    async def unload(http: web.Request) -> web.Response:
        model = model_of(http)
        if _wants_to_wait(http):
            return _json({"status": await lifecycle.unload(gateway, model)})
        gateway.residency.unload(model.name)
        return _json({"status": "asked"}, status=202)

    return [
        web.get("/admin/models", models),
        web.get("/admin/replicas", replicas),
        web.get("/admin/plan", plan),
        web.post("/admin/models/{id:(?s:.*)}/load", load),
        web.post("/admin/models/{id:(?s:.*)}/unload", unload),
    ]


def _wants_to_wait(http: web.Request) -> bool:
    given = http.query.get("wait", "false")
    if given not in ("true", "false"):
        raise InvalidRequest(f"wait: wanted true or false, not {given[:40]!r}", param="wait")
    return given == "true"


def _describe(replica: Replica) -> dict[str, object]:
    found = asdict(replica.statistics())
    engine = replica.engine
    if engine is not None and engine.ready is not None:
        found["details"] = engine.ready.model.details
        found["load_seconds"] = round(engine.ready.load_seconds, 3)
    if replica.sighting is not None:
        found["remote_state"] = replica.sighting.state
    return found


def _json(value: object, *, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")
