"""``POST /tokenize`` and ``/detokenize``: what a model makes of a text, and back."""

from __future__ import annotations

import msgspec
from aiohttp import web

from slimproc.http.gateway import Gateway
from slimproc.http.openai.tokens_schema import parse_detokenize, parse_tokenize
from slimproc.ipc import wire


def routes(gateway: Gateway) -> list[web.RouteDef]:
    async def tokenize(http: web.Request) -> web.Response:
        call, model = await gateway.receive_question(http, parse_tokenize)
        report = await gateway.ask(
            model, lambda number: wire.Tokenize(number, call.text, call.add_special, call.parse_special)
        )
        assert isinstance(report, wire.Tokenized)
        return _json({"tokens": report.tokens, "count": len(report.tokens)})

    async def detokenize(http: web.Request) -> web.Response:
        call, model = await gateway.receive_question(http, parse_detokenize)
        report = await gateway.ask(model, lambda number: wire.Detokenize(number, call.tokens))
        assert isinstance(report, wire.Detokenized)
        return _json({"content": report.text, "prompt": report.text})

    return [web.post("/tokenize", tokenize), web.post("/detokenize", detokenize)]


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
