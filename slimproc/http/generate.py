"""From an admitted request to its answer, streamed or joined: the same for every route that generates."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final

from aiohttp import web

from slimproc.admission.controller import AdmissionController
from slimproc.admission.generation import Generation
from slimproc.errors import SlimprocError
from slimproc.http.disconnects import DisconnectSweeper
from slimproc.http.errors import on_infer, sse_error
from slimproc.http.openai.format import AnswerFormat
from slimproc.http.resuming import ResumableEventStream, header, obstacle
from slimproc.http.scored import ScoredEventStream, ScoredStream
from slimproc.http.sse import DONE, KEEPALIVE, EventClient, EventStream
from slimproc.metrics import Metrics
from slimproc.request import EmbedRequest, GenerateRequest, Work
from slimproc.stream import TokenStream, VectorStream

WRITE_LIMIT: Final = 30.0
"""Seconds in which a client must take the end of its answer."""

_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold the stream back until its end
}

VectorFormat = Callable[[list[VectorStream]], Awaitable[bytes]]
"""Makes the whole answer. Async, since that may take so long that others must have a turn meanwhile."""


class Answerer:
    """What every generating handler shares; one per server."""

    def __init__(
        self,
        admission: AdmissionController,
        metrics: Metrics,
        sweeper: DisconnectSweeper,
        *,
        keepalive_after: float,
    ) -> None:
        """``keepalive_after``: seconds of silence after which a stream is kept open with a comment."""
        self._admission = admission
        self._metrics = metrics
        self._sweeper = sweeper
        self.keepalive_after = keepalive_after

    async def joined(self, http: web.Request, request: GenerateRequest, answer: AnswerFormat) -> web.StreamResponse:
        """Generate to the end, then answer. Raises what becomes the status."""
        kind = TokenStream if request.logprobs is None else ScoredStream
        streams = [kind(index) for index in range(request.sequences)]
        async with self._finished(http, request, streams):
            return await _write(http, answer.body(streams))

    async def vectors(self, http: web.Request, request: EmbedRequest, answer: VectorFormat) -> web.StreamResponse:
        """Compute every vector, then answer. Raises what becomes the status."""
        streams = [VectorStream(index) for index in range(request.sequences)]
        async with self._finished(http, request, streams):
            return await _write(http, await answer(streams))

    @contextlib.asynccontextmanager
    async def _finished(self, http: web.Request, request: Work, streams: Sequence[TokenStream]) -> AsyncIterator[None]:
        """Inside, the work is done and its client still watched."""
        generation = self._admission.submit(request, streams)
        with self._sweeper.watching(http.transport):
            try:
                await generation.wait_finished()
            finally:
                generation.close()
            yield

    async def streamed(self, http: web.Request, request: GenerateRequest, answer: AnswerFormat) -> web.StreamResponse:
        """Events as they come. Raises only before the headers; they go out with the first text, or after a silence."""
        client = EventClient()
        streams = [self._event_stream(index, client, request, answer) for index in range(request.sequences)]
        generation = self._admission.submit(request, list(streams))
        try:
            with self._sweeper.watching(http.transport):
                started = await generation.wait_started(self.keepalive_after)
                response = await self._begin(http, client, answer, header(request))
                if not started:
                    client.write(KEEPALIVE)
                await self._follow(generation, client, answer, infer=on_infer(http))
        finally:
            generation.close()
            client.close()
        await _finish(response, http)
        return response

    def _event_stream(
        self, index: int, client: EventClient, request: GenerateRequest, answer: AnswerFormat
    ) -> TokenStream:
        gaps = self._metrics.model(request.model).inter_token
        if request.logprobs is not None:
            finish_events = answer.finish_events(index)
            return ScoredEventStream(index, client, event=answer.scored_event, finish_events=finish_events, gaps=gaps)
        head, tail = answer.head_and_tail(index)
        kind = ResumableEventStream if request.on_crash == "resume" and not obstacle(request) else EventStream
        return kind(index, client, head=head, tail=tail, finish_events=answer.finish_events(index), gaps=gaps)

    async def _begin(
        self, http: web.Request, client: EventClient, answer: AnswerFormat, headers: dict[str, str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=_HEADERS | headers)
        chunked = http.version >= (1, 1)
        if chunked:
            response.enable_chunked_encoding()
        else:
            response.force_close()
        await response.prepare(http)
        if http.transport is None:
            raise ConnectionResetError("the client left before the first token")
        client.attach(http.transport, chunked=chunked, prelude=answer.prelude())
        return response

    async def _follow(self, generation: Generation, client: EventClient, answer: AnswerFormat, *, infer: bool) -> None:
        """The headers are out: whatever happens now is told in the stream."""
        try:
            spoken = -1
            while not await generation.wait_finished(self.keepalive_after):
                tokens = sum(stream.completion_tokens for stream in generation.streams)
                if tokens in (spoken, 0):
                    client.write(KEEPALIVE)
                spoken = tokens
            client.write(answer.usage_event(generation.streams) + DONE)
        except SlimprocError as error:
            client.write(sse_error(error, infer=infer) + DONE)


async def _write(http: web.Request, body: bytes) -> web.StreamResponse:
    """Written here and not by aiohttp, which would wait for ever for a client that does not read."""
    response = web.Response(body=body, content_type="application/json")
    await response.prepare(http)
    await response.write_eof()
    return response


async def _finish(response: web.StreamResponse, http: web.Request) -> None:
    try:
        async with asyncio.timeout(WRITE_LIMIT):
            await response.write_eof()
    except TimeoutError:
        if http.transport is not None:
            http.transport.abort()
