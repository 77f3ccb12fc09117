"""Reading a request's body: how large, how slow, in which encoding, and what ``Expect`` is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import hdrs, web
from aiohttp.web_protocol import RequestPayloadError

from slimproc.errors import (
    BodyTimeout,
    BodyTooLarge,
    ExpectationFailed,
    InvalidRequest,
    SlimprocError,
    UnsupportedMediaType,
)

REFUSAL: Final = web.RequestKey("refusal", SlimprocError)
"""Request key: an error found before the middleware ran, which the middleware raises."""

_WANTS_CONTINUE: Final = web.RequestKey("wants continue", bool)
"""Request key: the client waits to be told that its body is wanted."""

_UTF8: Final = frozenset({"utf-8", "utf8", "us-ascii", "ascii"})
_BOM: Final = b"\xef\xbb\xbf"


async def read_json_body(request: web.Request, *, limit: int, timeout: float, rate: float = 65536) -> bytes:  # noqa: ASYNC109 - it moves
    """The whole body, at most ``limit`` bytes, without a byte order mark.

    It must arrive within ``timeout`` seconds plus one second for every ``rate`` bytes that have come. Whatever its
    content type says, it is taken for JSON (curl's default is a form), unless it says that it cannot be.

    Raises BodyTooLarge (nothing is read when the length says so beforehand), BodyTimeout, UnsupportedMediaType,
    InvalidRequest for broken framing, and ConnectionError when the client leaves before the end.
    """
    refuse_media_type(request)
    refuse_length(request, limit)
    body = bytearray()
    loop = asyncio.get_running_loop()
    start = loop.time()
    try:
        async with asyncio.timeout_at(start + timeout) as deadline:
            while chunk := await request.content.readany():
                body += chunk
                if len(body) > limit:
                    raise BodyTooLarge(f"the body is larger than {limit} bytes")
                deadline.reschedule(start + timeout + len(body) / rate)
    except TimeoutError:
        raise BodyTimeout(f"the body did not arrive in time; {len(body)} bytes did") from None
    except RequestPayloadError as error:
        raise InvalidRequest("the body's framing is broken") from error
    return bytes(body).removeprefix(_BOM)


def refuse_media_type(request: web.Request) -> None:
    """Raise UnsupportedMediaType for a body that is compressed, multipart, or in a charset other than UTF-8."""
    for header in request.headers.getall(hdrs.CONTENT_ENCODING, []):
        for coding in header.split(","):
            if coding.strip().lower() not in {"", "identity"}:
                raise UnsupportedMediaType(f"Content-Encoding {coding.strip()[:40]!r} is not supported: send it plain")
    if request.content_type.startswith("multipart/"):
        raise UnsupportedMediaType("a JSON body is needed, not a multipart one")
    charset = request.charset
    if charset is not None and charset.strip("\"' ").lower() not in _UTF8:
        raise UnsupportedMediaType(f"charset {charset[:40]!r} is not supported: JSON is UTF-8")


def refuse_length(request: web.Request, limit: int) -> None:
    """Raise BodyTooLarge when Content-Length alone says so."""
    length = request.content_length
    if length is not None and length > limit:
        raise BodyTooLarge(f"the body has {length} bytes; the limit is {limit}")


def say_continue(request: web.Request) -> None:
    """Tell a client that waits for it (see ``expect_later``) to send its body; once, and nothing to any other."""
    if request.pop(_WANTS_CONTINUE, False) and request.transport is not None:
        # Past aiohttp's writer, whose count of sent bytes would say that the answer had begun.
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


async def expect_later(request: web.Request) -> web.StreamResponse | None:
    """For ``add_route(expect_handler=…)`` of a route whose handler calls ``say_continue`` when it reads the body."""
    if request.version >= (1, 1):
        if _expects_continue(request):
            request[_WANTS_CONTINUE] = True
        else:
            request[REFUSAL] = _unknown_expectation()
    return None


def expect_handler(limit: int) -> Callable[[web.Request], Awaitable[web.StreamResponse | None]]:
    """For ``add_route(expect_handler=…)``: say ``100 Continue`` only to a body that will be read.

    aiohttp calls it before the middlewares and would send the 100 for anything. A refusal is left on the request
    for the middleware, so that it is answered, logged and numbered like every other.
    """

    async def answer(request: web.Request) -> web.StreamResponse | None:
        if request.version < (1, 1):
            return None  # RFC 9110, 10.1.1: ignored from a client that cannot know it
        if not _expects_continue(request):
            request[REFUSAL] = _unknown_expectation()
            return None
        try:
            refuse_media_type(request)
            refuse_length(request, limit)
        except (BodyTooLarge, UnsupportedMediaType) as error:
            request[REFUSAL] = error
            return None
        request[_WANTS_CONTINUE] = True
        say_continue(request)
        return None

    return answer


def _expects_continue(request: web.Request) -> bool:
    return request.headers.get(hdrs.EXPECT, "").strip().lower() == "100-continue"


def _unknown_expectation() -> ExpectationFailed:
    return ExpectationFailed("the only expectation that can be met is 100-continue")
