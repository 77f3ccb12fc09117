"""Liveness, readiness and metrics: what orchestrators and Prometheus ask."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from slimproc.http.errors import public_text
from slimproc.http.exposition import Exposition
from slimproc.http.gateway import Gateway
from slimproc.http.status import router_word
from slimproc.replicas.replica import Replica
from slimproc.replicas.states import ReplicaState


def routes(gateway: Gateway) -> list[web.RouteDef]:
    exposition = Exposition(gateway.metrics)

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(body=b'{"status":"ok"}', content_type="application/json")

    async def readyz(_: web.Request) -> web.Response:
        models = {name: _readiness(gateway, name) for name in gateway.config.models}
        faults = {device.id: device.fault for device in gateway.residency.devices() if device.fault}
        lost = "lost" in faults.values()
        ready = all(model["ready"] for model in models.values()) and not lost
        body: dict[str, Any] = {"status": "ready" if ready else "failed" if lost else _worst(models), "models": models}
        if faults:
            body["devices"] = faults
        if fault := gateway.residency.driver_fault:
            body["driver"] = fault
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
    """Ready means that the model can serve, or will when it is asked for; not that it has room: overload is told per
    request. What is to be loaded at the start has to have been.
    """
    replicas = gateway.supervisor.of(model)
    able = sum(replica.state in (ReplicaState.READY, ReplicaState.DRAINING) for replica in replicas)
    on_demand = not gateway.residency.preloading(model) and any(_may_be_loaded(replica) for replica in replicas)
    obstacle = "" if able else gateway.residency.obstacle(model)
    found: dict[str, Any] = {
        "ready": able > 0 or (on_demand and not obstacle),
        "status": "ready" if able else "failed" if obstacle else router_word(replicas),
        "replicas": {"ready": able, "of": len(replicas)},
    }
    if not able:
        found["progress"] = round(max(replica.statistics().progress for replica in replicas), 3)
    told = (replica.unload_failed or replica.reason for replica in replicas)
    reasons = [reason for reason in (*told, obstacle) if reason]
    if reasons:
        found["reason"] = public_text(reasons[0])
    ready = [replica.engine.ready for replica in replicas if replica.engine is not None and replica.engine.ready]
    if levels := {str(one.model.details.get("confinement", "off")) for one in ready}:
        found["confinement"] = ", ".join(sorted(levels))
    return found


def _may_be_loaded(replica: Replica) -> bool:
    """It is not in memory, or on its way in or out of it, and nothing has gone wrong with it since it last served."""
    orderly = (ReplicaState.STOPPED, ReplicaState.STOPPING, ReplicaState.STARTING)
    return replica.state in orderly and not replica.reason and not replica.unload_failed


def _worst(models: dict[str, dict[str, Any]]) -> str:
    found = {model["status"] for model in models.values()}
    return "failed" if "failed" in found else "loading"
