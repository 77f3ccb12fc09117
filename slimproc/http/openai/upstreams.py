"""OpenAI's routes for models of upstreams: the body's ``model`` is looked at, and the body passed on as it is.

Only put around the routes of a configuration that has such models: the others pay nothing for it.
"""

from __future__ import annotations

import time

import msgspec
from aiohttp import web

from slimproc.admission.passage import Forward
from slimproc.errors import BodyTooLarge, SlimprocError
from slimproc.http.decode import decode
from slimproc.http.gateway import BODY, Gateway, ReceivedBody
from slimproc.http.middleware import request_id
from slimproc.request import Deadline


class _Named(msgspec.Struct):
    model: str | None = None


_named = msgspec.json.Decoder(_Named)


def reaching_upstreams(gateway: Gateway, route: web.RouteDef) -> web.RouteDef:
    """The same route, which passes on what a model of an upstream is asked, at the same path of that."""

    async def handle(http: web.Request) -> web.StreamResponse:
        if not gateway.has_upstreams:
            return await route.handler(http)
        arrived = time.monotonic()
        model = None
        try:
            body = await gateway.read_body(http)
            model = gateway.resolve(http, decode(body, _named).model)
            if model.upstream is not None:
                if model.max_body is not None and len(body) > model.max_body:
                    raise BodyTooLarge(f"the body has {len(body)} bytes; the limit is {model.max_body}")
                deadline = Deadline.after(gateway.time_limit(http, model.request_timeout), arrived)
        except SlimprocError as error:
            gateway.metrics.reject(model.name if model else None, error)
            raise
        if model.upstream is None:
            http[BODY] = ReceivedBody(body, arrived)
            return await route.handler(http)
        wanted = Forward(id=request_id(http), model=model.name, deadline=deadline)
        return await gateway.relay.pass_on(http, wanted, route.path + _query(http), body)

    return web.RouteDef(route.method, route.path, handle, route.kwargs)


def _query(http: web.Request) -> str:
    query = http.rel_url.raw_query_string
    return "?" + query if query else ""
