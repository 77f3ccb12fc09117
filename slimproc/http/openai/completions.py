"""``POST /v1/completions``."""

from __future__ import annotations

from aiohttp import web

from slimproc.http.gateway import Gateway
from slimproc.http.openai.completions_schema import parse_completion
from slimproc.http.openai.format import CompletionFormat


def routes(gateway: Gateway) -> list[web.RouteDef]:
    async def create(http: web.Request) -> web.StreamResponse:
        call, request = await gateway.receive(http, parse_completion)
        answer = CompletionFormat(request, include_usage=call.include_usage)
        handle = gateway.answerer.streamed if call.stream else gateway.answerer.joined
        return await handle(http, request, answer)

    return [web.post("/v1/completions", create)]
