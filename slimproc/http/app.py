"""The two applications, public and admin, and the runner that serves one."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from slimproc.http import admin, health, infer, infer_errors, middleware
from slimproc.http.body import expect_handler, expect_later
from slimproc.http.gateway import Gateway
from slimproc.http.openai import chat, completions, embeddings, models, rerank, tokens
from slimproc.http.openai.upstreams import reaching_upstreams
from slimproc.http.protocol import JsonAppRunner

KEEPALIVE_TIMEOUT: Final = 75.0
"""Seconds that an idle connection stays; aiohttp's own default is an hour."""
ADMIN_BODY_LIMIT: Final = 64 * 1024


def public_app(gateway: Gateway) -> web.Application:
    """The routes of ``listen``."""
    asking = [route for module in (completions, chat, embeddings, rerank, tokens) for route in module.routes(gateway)]
    inferring = infer.routes(gateway, {route.path: route.handler for route in asking})
    reaching = [reaching_upstreams(gateway, route) for route in asking]
    routes = [*reaching, *inferring, *models.routes(gateway), *health.routes(gateway)]
    return _app(routes, body_limit=gateway.config.max_json_body)


def admin_app(gateway: Gateway) -> web.Application:
    """The routes of the admin socket."""
    return _app(admin.routes(gateway), body_limit=ADMIN_BODY_LIMIT)


def _app(routes: list[web.RouteDef], *, body_limit: int) -> web.Application:
    app = web.Application(client_max_size=body_limit)
    at_once = expect_handler(body_limit)
    for route in routes:
        expect = expect_later if route.path == infer_errors.PATH else at_once
        app.router.add_route(route.method, route.path, route.handler, expect_handler=expect)
        if route.method == "GET" and route.kwargs.get("allow_head", True):
            app.router.add_route("HEAD", route.path, route.handler, expect_handler=expect)
    middleware.install(app, body_limit=body_limit)
    return app


def make_runner(app: web.Application, *, shutdown_timeout: float) -> JsonAppRunner:
    """A runner that waits at most ``shutdown_timeout`` seconds for handlers when it is cleaned up."""
    return JsonAppRunner(app, keepalive_timeout=KEEPALIVE_TIMEOUT, shutdown_timeout=shutdown_timeout)
