"""The outermost layer of every request: its id, its access line, and the translation of every exception.

``install`` puts it on an application. What fails before any middleware runs is in ``protocol.py``.
"""

from __future__ import annotations

import re
import time
from typing import Final

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from slimproc import logs
from slimproc.errors import InternalError, MethodNotAllowed, NotFound, SlimprocError
from slimproc.http.body import REFUSAL, expect_handler
from slimproc.http.errors import CODE, PRIVATE, error_response, from_http_exception, on_infer

CLIENT_GONE: Final = 499
"""nginx's word in the access line for a client that left before its answer. Never sent."""

MAX_PATH: Final = 200
"""Characters of the path that the access line shows."""

MODEL: Final = web.RequestKey("model", str)
"""Request key: the configured name of the model that is meant, which a handler sets once it knows. For the access line."""

_ID: Final = web.RequestKey("id", str)
_STARTED: Final = web.RequestKey("started", int)
"""The status of the answer whose headers have gone out."""

_QUERY: Final = re.compile("[?#]")

log = logs.get("slimproc.access")


def install(app: web.Application, *, body_limit: int) -> None:
    """Add the middleware, the id on every answer, and the route that answers what no other route does.

    Call it after the last route has been added. ``body_limit`` (bytes) is for bodies sent where nobody reads them.
    """
    app.middlewares.insert(0, answer_errors)
    app.on_response_prepare.append(_on_prepare)
    # aiohttp's own 404 sends "100 Continue" first, and lets an unknown Expect past the middlewares.
    app.router.add_route(hdrs.METH_ANY, "/{path:(?s:.*)}", _no_route, expect_handler=expect_handler(body_limit))


def request_id(request: web.BaseRequest) -> str:
    """The request's id: the caller's own where it is safe to log and to send back, else a new one."""
    known = request.get(_ID)
    if known is None:
        known = request[_ID] = logs.accept_request_id(request.headers.get("x-request-id"))
    return known


def access_line(request: web.BaseRequest, status: int, code: str | None, seconds: float) -> None:
    """One line per request. ``code``: of the error in its answer. The path is as it was sent, still percent-encoded; it is
    the caller's text. Its query is left out: what goes on to a model's server may be a prompt.
    """
    log.info(
        "request",
        method=request.method,
        path=_QUERY.split(request.raw_path, maxsplit=1)[0][:MAX_PATH],
        status=status,
        code=code,
        model=request.get(MODEL),
        duration_ms=round(seconds * 1e3, 1),
        request_id=request_id(request),
    )


class AnswerCut(ConnectionResetError):
    """The handler failed when part of its answer was on the wire. aiohttp closes the connection on it, silently.

    A handler that has told why by itself raises it too.
    """


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Run the handler; whatever it raises becomes an answer, and one line says how the request went."""
    began = time.monotonic()
    status = CLIENT_GONE
    code: str | None = None
    try:
        response = await _answered(request, handler)
        status, code = response.status, response.get(CODE)
    except web.HTTPException as redirect:
        status = redirect.status
        raise
    except AnswerCut:
        status = request[_STARTED]
        raise
    finally:
        access_line(request, status, code, time.monotonic() - began)
    return response


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The handler's answer, or the one for what it raised. That a client left is nobody's fault, and passes through."""
    infer = on_infer(request)
    try:
        return await _handled(request, handler)
    except AnswerCut:
        raise
    except web.HTTPException as error:
        if error.status < 400:
            raise
        answer = from_http_exception(error, request)
    except SlimprocError as error:
        if isinstance(error, PRIVATE) or _STARTED in request:
            log.exception("a request failed", request_id=request_id(request))
        answer = error_response(error, infer=infer)
    except Exception as error:
        if isinstance(error, ConnectionError) and _gone(request):
            raise
        log.exception("a request failed", request_id=request_id(request))
        answer = error_response(InternalError("unexpected"), infer=infer)
    if _STARTED in request:
        raise AnswerCut
    if not request.content.is_eof():
        # The body's rest would be taken for the next request, or be waited for.
        answer.force_close()
    return answer


async def _handled(request: web.Request, handler: Handler) -> web.StreamResponse:
    if (refusal := request.get(REFUSAL)) is not None:
        raise refusal
    response = await handler(request)
    if not isinstance(response, web.StreamResponse):
        raise TypeError(f"a handler returned {type(response).__name__}")
    return response


def _gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


async def _on_prepare(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["x-request-id"] = request_id(request)
    request[_STARTED] = response.status


async def _no_route(request: web.Request) -> web.StreamResponse:
    """404, or 405 where another method has a route."""
    allowed: set[str] = set()
    for resource in request.app.router.resources():
        if resource is not request.match_info.route.resource:
            allowed |= (await resource.resolve(request))[1]
    subject = f"{request.method} {request.path}"
    if not allowed:
        meant = f"/v1{request.path}"
        there = any(resource.canonical == meant for resource in request.app.router.resources())
        raise NotFound(f"there is no route {subject}{f'; there is {meant}' if there else ''}")
    error = MethodNotAllowed(f"{subject}: this method is not allowed here")
    response = error_response(error, infer=on_infer(request))
    response.headers[hdrs.ALLOW] = ", ".join(sorted(allowed))
    return response
