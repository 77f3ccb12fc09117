"""``POST /v1/embeddings``."""

from __future__ import annotations

import asyncio
import binascii
import sys
from array import array
from typing import Final

import msgspec
from aiohttp import web

from slimproc.http.gateway import Gateway
from slimproc.http.openai.embeddings_schema import parse_embeddings
from slimproc.stream import VectorStream

_TURN: Final = 1 << 18
"""Bytes of vectors after which others get a turn: as numbers they take some 10 ms to write out."""

_encode = msgspec.json.Encoder().encode


def routes(gateway: Gateway) -> list[web.RouteDef]:
    async def create(http: web.Request) -> web.StreamResponse:
        call, request = await gateway.receive(http, parse_embeddings)

        async def answer(streams: list[VectorStream]) -> bytes:
            data = await _data(streams, base64=call.base64)
            rest = {"object": "list", "model": request.model, "usage": usage(streams)}
            return b'%b,"data":[%b]}' % (_encode(rest)[:-1], data)

        return await gateway.answerer.vectors(http, request, answer)

    return [web.post("/v1/embeddings", create)]


def usage(streams: list[VectorStream]) -> dict[str, int]:
    tokens = sum(stream.usage.prompt_tokens for stream in streams)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


async def _data(streams: list[VectorStream], *, base64: bool) -> bytes:
    """The entries of ``data``, in the order of the inputs. 2,048 long vectors are seconds of work, so it is shared out."""
    entries = []
    done = 0
    for stream in streams:
        entry = {"object": "embedding", "index": stream.index, "embedding": _spelled(stream.vector, base64=base64)}
        entries.append(_encode(entry))
        done += len(stream.vector)
        if done >= _TURN:
            done = 0
            await asyncio.sleep(0)
    return b",".join(entries)


def _spelled(vector: bytearray, *, base64: bool) -> str | list[float]:
    return binascii.b2a_base64(vector, newline=False).decode() if base64 else numbers(vector)


def numbers(vector: bytearray) -> list[float]:
    """The values of little-endian float32."""
    values = array("f", bytes(vector))
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
