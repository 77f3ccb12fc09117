"""``POST /v1/rerank``."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec
from aiohttp import web

from slimproc.http.gateway import Gateway
from slimproc.http.openai.embeddings import numbers, usage
from slimproc.http.openai.rerank_schema import RerankCall, parse_rerank
from slimproc.stream import VectorStream


def routes(gateway: Gateway) -> list[web.RouteDef]:
    async def create(http: web.Request) -> web.StreamResponse:
        call, request = await gateway.receive(http, parse_rerank)

        async def answer(streams: list[VectorStream]) -> bytes:
            return msgspec.json.encode(
                {
                    "id": f"rerank-{secrets.token_hex(16)}",
                    "object": "list",
                    "model": request.model,
                    "results": _results(call, streams),
                    "usage": usage(streams),
                }
            )

        return await gateway.answerer.vectors(http, request, answer)

    return [web.post("/v1/rerank", create)]


def _results(call: RerankCall, streams: list[VectorStream]) -> list[dict[str, Any]]:
    """The best first; of equal ones, the one that stood first in the body."""
    scores = [numbers(stream.vector)[0] for stream in streams]
    best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: call.top_n]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
    if call.return_documents:
        for result in results:
            result["document"] = {"text": call.documents[result["index"]]}
    return results
