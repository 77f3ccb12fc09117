"""Liveness, readiness and metrics: what orchestrators and Prometheus ask."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from slimproc.http.exposition import Exposition
from slimproc.http.gateway import Gateway
from slimproc.http.openai.models import status
from slimproc.replicas.states import ReplicaState


def routes(gateway: Gateway) -> list[web.RouteDef]:
    exposition = Exposition(gateway.metrics)

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(body=b'{"status":"ok"}', content_type="application/json")

    async def readyz(_: web.Request) -> web.Response:
        models = {name: _readiness(gateway, name) for name in gateway.config.models}
        ready = all(model["ready"] for model in models.values())
        body = {"status": "ready" if ready else _worst(models), "models": models}
        return web.Response(
            status=200 if ready else 503, body=msgspec.json.encode(body), content_type="application/json"
        )

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=exposition.render(), headers={"Content-Type": exposition.content_type})

    return [
        web.get("/health", health),
        web.get("/healthz", healthz),
        web.get("/readyz", readyz),
        web.get("/metrics", metrics),
    ]


def _readiness(gateway: Gateway, model: str) -> dict[str, Any]:
    """Ready means that the model can serve, not that it has room: overload is told per request."""
    replicas = gateway.supervisor.of(model)
    able = sum(replica.state in (ReplicaState.READY, ReplicaState.DRAINING) for replica in replicas)
    state = status(gateway, model)
    found: dict[str, Any] = {
        "ready": able > 0,
        "status": "ready" if able else state,
        "replicas": {"ready": able, "of": len(replicas)},
    }
    if not able:
        found["progress"] = round(max(replica.statistics().progress for replica in replicas), 3)
    reasons = [replica.reason for replica in replicas if replica.reason]
    if reasons:
        found["reason"] = reasons[0]
    return found


def _worst(models: dict[str, dict[str, Any]]) -> str:
    found = {model["status"] for model in models.values()}
    return "failed" if "failed" in found else "loading"
