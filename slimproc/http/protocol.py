"""The runner whose connections answer in JSON even what aiohttp refuses before any middleware runs.

A bad request line, headers that are too large, a broken chunk: aiohttp's parser rejects them where no request exists
yet, and its ``RequestHandler`` answers in plain text. Two of its methods are overridden for that.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from slimproc import logs
from slimproc.errors import InternalError
from slimproc.http.errors import CODE, error_response, from_http_exception, on_infer, plain_error
from slimproc.http.middleware import access_line, request_id

log = logs.get("slimproc.access")


class JsonRequestHandler(web.RequestHandler):
    """One connection."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - aiohttp's signature; its text quotes the raw bytes
    ) -> web.StreamResponse:
        """What aiohttp itself refuses, and what escaped the middleware (a bug). The connection closes."""
        if request.writer is not None and request.writer.output_size > 0:
            raise ConnectionResetError("the answer had begun")
        if isinstance(exc, HttpProcessingError):
            # A caller's fault, and common on any port that strangers reach: no traceback.
            too_long = isinstance(exc, LineTooLong)
            answer = plain_error(
                431 if too_long else status,
                "the request line or a header is too long" if too_long else "this is no valid HTTP request",
            )
        else:
            log.exception("a request failed", request_id=request_id(request))  # noqa: LOG004 - called while it is handled
            answer = error_response(InternalError("unexpected"), infer=on_infer(request))
        answer.headers["x-request-id"] = request_id(request)
        answer.force_close()
        access_line(request, answer.status, answer.get(CODE), 0.0)
        return answer

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Every answer passes here; one that is aiohttp's own text was raised outside the middleware."""
        if isinstance(resp, web.HTTPException) and resp.status >= 400:
            resp = from_http_exception(resp, request)
            resp.headers["x-request-id"] = request_id(request)
            resp.force_close()
            access_line(request, resp.status, resp.get(CODE), 0.0)
        return await super().finish_response(request, resp, start_time)


class JsonServer(web.Server):
    """The factory of connections that the listening sockets call."""

    def __call__(self) -> web.RequestHandler:
        return JsonRequestHandler(self, loop=self._loop, **self._kwargs)


class JsonAppRunner(web.AppRunner):
    """``web.AppRunner`` with JSON all the way down. Bodies are never decompressed: ``read_json_body`` refuses them.

    ``handler_cancellation`` is on: a client that goes away cancels its handler.
    """

    def __init__(self, app: web.Application, **options: Any) -> None:
        settings = {"handler_cancellation": True, "auto_decompress": False, "access_log": None, "lingering_time": 2.0}
        super().__init__(app, **(settings | options))

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return JsonServer(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=asyncio.get_running_loop(),
            **made._kwargs,  # noqa: SLF001 - the one thing that a Server keeps to itself
        )
