"""A request that an upstream answers: admitted, forwarded, and its answer passed back as it comes."""

from __future__ import annotations

import contextlib
import socket
import struct

from aiohttp import hdrs, web

from slimproc.admission.controller import AdmissionController
from slimproc.admission.passage import Forward, Passage
from slimproc.errors import BackendFailed, SlimprocError
from slimproc.http.disconnects import DisconnectSweeper
from slimproc.http.middleware import AnswerCut
from slimproc.http.upload import Upload
from slimproc.upstream.proxy import Forwarder, Unreachable, UpstreamAnswer, request_headers


class Relay:
    """What every forwarding handler shares; one per server."""

    def __init__(self, admission: AdmissionController, sweeper: DisconnectSweeper) -> None:
        self._admission = admission
        self._sweeper = sweeper
        self._forwarder = Forwarder()

    async def pass_on(
        self, http: web.Request, wanted: Forward, target: str, body: bytes | Upload
    ) -> web.StreamResponse:
        """Send ``body`` to ``target`` (a path, perhaps with a query) of the model's server, once that can take it.

        Raises what becomes the status, or, when part of the answer has gone out, AnswerCut: the client's connection
        ends without the answer's end.
        """
        passage = self._admission.pass_on(wanted)
        response: web.StreamResponse | None = None
        try:
            with self._sweeper.watching(http.transport):
                async with passage.held():
                    answer = await self._send(http, passage, target, body)
                    try:
                        response = _begin(http, answer, body)
                        await self._copy(http, passage, answer, response, body)
                    finally:
                        answer.close()
                        passage.bytes_in = _size(body)
        except SlimprocError:
            if response is None or not response.prepared:
                raise
            if http.version < (1, 1):
                _reset(http)  # a mere end of the connection would be the answer's end there
            raise AnswerCut from None
        return response

    async def _send(self, http: web.Request, passage: Passage, target: str, body: bytes | Upload) -> UpstreamAnswer:
        """Wait for a turn, and for the answer's headers. A server that cannot be reached is left out, once."""
        headers = request_headers(http.headers, passage.request.id)
        while True:
            slot = await passage.wait_granted()
            content = body.chunks() if isinstance(body, Upload) and not body.ended else _whole(body)
            try:
                return await self._forwarder.send(slot.base_url + target, headers, content)
            except Unreachable as error:
                passage.try_another(error)
            except BackendFailed:
                _raise_callers_fault(body)
                raise
            finally:
                passage.bytes_in = _size(body)

    async def _copy(
        self,
        http: web.Request,
        passage: Passage,
        answer: UpstreamAnswer,
        response: web.StreamResponse,
        body: bytes | Upload,
    ) -> None:
        passage.status = answer.status
        await response.prepare(http)
        try:
            while chunk := await answer.read():
                await response.write(chunk)
                passage.bytes_out += len(chunk)
        except BackendFailed:
            _raise_callers_fault(body)
            raise
        answer.close()
        passage.bytes_in = _size(body)
        passage.close("ok" if answer.status < 500 else "engine_error")
        await response.write_eof()

    async def close(self) -> None:
        await self._forwarder.close()


def _begin(http: web.Request, answer: UpstreamAnswer, body: bytes | Upload) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, reason=answer.reason)
    for name, value in answer.headers:
        response.headers.add(name, value)
    if hdrs.CONTENT_LENGTH not in response.headers and http.version < (1, 1):
        response.force_close()
    if isinstance(body, Upload) and not body.ended:
        response.force_close()  # what has not been read by then would be taken for the next request
    return response


def _reset(http: web.Request) -> None:
    transport = http.transport
    sock = None if transport is None else transport.get_extra_info("socket")
    if transport is not None and sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()


def _whole(body: bytes | Upload) -> bytes | None:
    return body if isinstance(body, bytes) else None


def _size(body: bytes | Upload) -> int:
    return len(body) if isinstance(body, bytes) else body.size


def _raise_callers_fault(body: bytes | Upload) -> None:
    """What was wrong with the body itself broke the forwarding off, and is told in place of that."""
    if isinstance(body, Upload) and body.error is not None:
        raise body.error from None
