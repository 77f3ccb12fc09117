"""``POST /infer?model=``: any model by name, its body unchanged; errors as in ``infer_errors.py``."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Final
from urllib.parse import unquote_plus

from aiohttp import web
from aiohttp.typedefs import Handler

from slimproc.admission.passage import Forward
from slimproc.config import ModelConfig
from slimproc.errors import InvalidRequest, NotFound, SlimprocError
from slimproc.http import infer_errors
from slimproc.http.body import refuse_length
from slimproc.http.gateway import INFER_MODEL, Gateway
from slimproc.http.middleware import request_id
from slimproc.http.upload import Upload

_NOT_ASCII: Final = re.compile(rb"[^!-~]")


def routes(gateway: Gateway, endpoints: Mapping[str, Handler]) -> list[web.RouteDef]:
    """``endpoints``: the handlers of local models by their path."""

    async def infer(http: web.Request) -> web.StreamResponse:
        arrived = time.monotonic()
        model: ModelConfig | None = None
        try:
            name, query = split_query(http.raw_path)
            model = gateway.resolve(http, name)
            if model.upstream is not None:
                refuse_length(http, _limit(model))
                deadline, queue_deadline = gateway.infer_deadlines(http, model, arrived)
            elif model.inference_path not in endpoints:
                raise NotFound(f"the model {model.name} has nothing that answers here")
        except SlimprocError as error:
            gateway.metrics.reject(model.name if model else None, error)
            raise
        if model.upstream is None:
            http[INFER_MODEL] = model
            return await endpoints[model.inference_path](http)
        wanted = Forward(id=request_id(http), model=model.name, deadline=deadline, queue_deadline=queue_deadline)
        body = Upload(http, limit=_limit(model), patience=gateway.config.body_timeout)
        return await gateway.relay.pass_on(http, wanted, model.inference_path + query, body)

    return [web.post(infer_errors.PATH, infer)]


def _limit(model: ModelConfig) -> int:
    assert model.max_body is not None, "an upstream has one"
    return model.max_body


def split_query(target: str) -> tuple[str, str]:
    """The value of ``model`` in a request's target, and the rest of its query as it was written, with its ``?`` (empty
    when there is no rest). Raises InvalidRequest when there is no such value, or more than one.
    """
    query = target.partition("#")[0].partition("?")[2]
    names: list[str] = []
    rest: list[str] = []
    for piece in query.split("&"):
        key, _, value = piece.partition("=")
        if _decoded(key) == "model":
            names.append(value)
        else:
            rest.append(piece)
    if len(names) > 1:
        raise InvalidRequest("model: the query names it more than once", param="model")
    name = _decoded(names[0]) if names else ""
    if not name:
        raise InvalidRequest("model: the query must name one, as in /infer?model=NAME", param="model")
    kept = "&".join(rest)
    return name, "?" + _ascii(kept) if kept else ""


def _decoded(text: str) -> str:
    """As forms are: a plus is a space. Bytes that are no UTF-8 stay recognizably wrong: no model has such a name."""
    return unquote_plus(text, errors="surrogateescape")


def _ascii(query: str) -> str:
    """What must not stand in a request line, and which only a careless client sends, is escaped; nothing else changes."""
    raw = query.encode(errors="surrogateescape")
    return _NOT_ASCII.sub(lambda found: b"%%%02X" % found[0][0], raw).decode()
