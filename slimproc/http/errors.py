"""How an error looks to a caller, as a body, as an answer, and as an event in a stream: OpenAI's error object, or on
``/infer`` the flat one of ``infer_errors.py``.
"""

from __future__ import annotations

import math
import re
from http import HTTPStatus
from typing import Final

import msgspec
from aiohttp import web

from slimproc.errors import (
    BodyTimeout,
    BodyTooLarge,
    ConfigError,
    ExpectationFailed,
    IllegalTransition,
    InsufficientMemory,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    RingCorrupt,
    SlimprocError,
    UnsupportedMediaType,
)
from slimproc.http import infer_errors

MAX_MESSAGE: Final = 1000
"""Characters. Messages quote what callers sent, which can be megabytes."""

MAX_RETRY_AFTER: Final = 60
"""Seconds. OpenAI's SDK does not retry at all when told to wait longer than 120."""

PRIVATE: Final = (InternalError, ConfigError, RingCorrupt, IllegalTransition)
"""Errors whose words are for the log only."""

CODE: Final = web.ResponseKey("code", str)
"""Response key: the code that the error in the body has."""

_PRIVATE_MESSAGE: Final = "the server failed on this request; its log says why"
_CLOSING: Final = (BodyTimeout, BodyTooLarge, ExpectationFailed)
"""After these the rest of the body is unread or was never sent: the next request could not be told from it."""

_DIRECTORIES: Final = re.compile(r"(?<![\w.:/])/(?:[^\s/'\":]+/)+")


def on_infer(request: web.BaseRequest) -> bool:
    """Whether errors of this request have ``/infer``'s shape."""
    return request.path == infer_errors.PATH


def error_object(error: SlimprocError) -> dict[str, object]:
    """``{"message", "type", "param", "code"}``."""
    if isinstance(error, PRIVATE):
        return {"message": _PRIVATE_MESSAGE, "type": "server_error", "param": None, "code": _code(error)}
    return {"message": _public(error), "type": error.type, "param": error.param, "code": _code(error)}


def _code(error: SlimprocError, *, infer: bool = False) -> str:
    if infer:
        return infer_errors.told(error).code
    return InternalError.code if isinstance(error, PRIVATE) else error.code


def error_body(error: SlimprocError, *, infer: bool = False) -> bytes:
    """The error as JSON; beside it, where memory is short, the ``plan`` in numbers."""
    if infer:
        body = _flat(_PRIVATE_MESSAGE if isinstance(error, PRIVATE) else _public(error), _code(error, infer=True))
    else:
        body = {"error": error_object(error)}
    if isinstance(error, InsufficientMemory) and error.plan is not None:
        body["plan"] = error.plan
    return msgspec.json.encode(body)


def sse_error(error: SlimprocError, *, infer: bool = False) -> bytes:
    """The error as one event, for a stream whose headers have gone out. ``data: [DONE]`` is the caller's to send."""
    return b"data: " + error_body(error, infer=infer) + b"\n\n"


def error_response(error: SlimprocError, *, infer: bool = False) -> web.Response:
    """The whole answer. After a body that was not read to its end the connection closes."""
    status = infer_errors.told(error).status if infer else error.status
    response = _response(status, error_body(error, infer=infer), _code(error, infer=infer))
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(_retry_after(error.retry_after))
    if not error.retryable:
        response.headers["x-should-retry"] = "false"
    if isinstance(error, _CLOSING):
        response.force_close()
    return response


def from_http_exception(error: web.HTTPException, request: web.BaseRequest) -> web.Response:
    """What aiohttp itself refuses (404, 405, 413, …) in our form; ``Allow`` is kept."""
    subject, infer = f"{request.method} {request.path}", on_infer(request)
    match error.status:
        case 404:
            return error_response(NotFound(f"there is no route {subject}"), infer=infer)
        case 405:
            response = error_response(MethodNotAllowed(f"{subject}: this method is not allowed here"), infer=infer)
            response.headers["Allow"] = error.headers.get("Allow", "")
            return response
        case 413:
            return error_response(BodyTooLarge("the body is too large"), infer=infer)
        case 415:
            return error_response(UnsupportedMediaType("this media type is not supported"), infer=infer)
        case 417:
            return error_response(ExpectationFailed("this Expect header cannot be met"), infer=infer)
    return plain_error(error.status, error.reason or HTTPStatus(error.status).phrase, infer=infer)


def plain_error(status: int, message: str, *, infer: bool = False) -> web.Response:
    """An answer for a status that no SlimprocError has: what HTTP itself refuses."""
    told = InternalError if status >= 500 else InvalidRequest
    code = infer_errors.told_for_status(status).code if infer else told.code
    body: dict[str, object] = {
        "error": {"message": _clipped(message), "type": told.type, "param": None, "code": code},
    }
    if infer:
        body = _flat(_clipped(message), code)
    return _response(status, msgspec.json.encode(body), code)


def _response(status: int, body: bytes, code: str) -> web.Response:
    response = web.Response(status=status, body=body, content_type="application/json")
    response[CODE] = code
    return response


def _flat(message: str, code: str) -> dict[str, object]:
    return {"error": message, "src": infer_errors.SOURCE, "code": code}


def _public(error: SlimprocError) -> str:
    """The error's message without what callers have no business to know.

    Errors of our side may carry words of an engine or the system: only their first line goes out (a traceback has
    more), and files are named without their directories. What callers did wrong is told in full.
    """
    return public_text(error.message) if error.status >= 500 else _clipped(error.message)


def public_text(text: str) -> str:
    """Words of an engine, a server or the system, as callers may see them: one line, and no directories."""
    return _clipped(_DIRECTORIES.sub("", text.strip().partition("\n")[0]))


def _clipped(message: str) -> str:
    # Names from the file system may hold lone surrogates, which no JSON encoder takes.
    message = message.encode(errors="replace").decode()
    return message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…"


def _retry_after(seconds: float) -> int:
    return math.ceil(min(max(seconds, 1.0), float(MAX_RETRY_AFTER)))
