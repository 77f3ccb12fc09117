"""Upload: a request's body that nobody here keeps: read when somebody wants it, bounded in size and in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from slimproc.errors import BodyTimeout, BodyTooLarge, InvalidRequest, SlimprocError
from slimproc.http.body import say_continue

RATE: Final = 65536
"""Bytes a second that a client must send at least, beside the time that it has anyway."""


class Upload:
    """The body of ``http``, at most ``limit`` bytes of it, for one reader and once.

    A client has ``patience`` seconds, and one more for every ``RATE`` bytes that have come. Only waiting for it counts:
    that whoever takes the bytes is slow is not the client's fault.
    """

    def __init__(self, http: web.Request, *, limit: int, patience: float) -> None:
        self.size = 0
        """Bytes that have been read."""
        self.ended = not http.body_exists
        """There is no more of it."""
        self.error: SlimprocError | None = None
        """What was wrong with it. Whoever reads it may only see that its reading failed."""
        self._http = http
        self._limit = limit
        self._patience = patience
        self._waited = 0.0

    async def chunks(self) -> AsyncIterator[bytes]:
        """The bytes as they come, in large pieces. A client that asked whether to send them is told so now.

        Raises BodyTooLarge, BodyTimeout, InvalidRequest for broken framing, and ConnectionError when the client leaves.
        """
        say_continue(self._http)
        try:
            while chunk := await self._next():
                self.size += len(chunk)
                if self.size > self._limit:
                    raise BodyTooLarge(f"the body is larger than {self._limit} bytes")
                yield chunk
        except SlimprocError as error:
            self.error = error
            raise
        self.ended = True

    async def _next(self) -> bytes:
        content = self._http.content
        try:
            if chunk := content.read_nowait():
                return chunk
            if content.at_eof():
                return b""
            loop = asyncio.get_running_loop()
            began = loop.time()
            async with asyncio.timeout(self._patience + self.size / RATE - self._waited):
                chunk = await content.readany()
            self._waited += loop.time() - began
        except TimeoutError:
            raise BodyTimeout(f"the body did not arrive in time; {self.size} bytes did") from None
        except RequestPayloadError as error:
            raise InvalidRequest("the body's framing is broken") from error
        return chunk
