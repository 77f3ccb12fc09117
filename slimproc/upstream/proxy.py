"""Forwarder: one HTTP request to an upstream and its answer, byte for byte, both ways in bounded memory.

Nothing is ever sent twice: of a server that closes a connection nobody can say how much of the request it has acted on.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterable
from typing import Final

import aiohttp
from aiohttp import hdrs
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from slimproc import logs
from slimproc.errors import BackendFailed

log = logs.get("slimproc.upstream")

CONNECT_LIMIT: Final = 5.0
"""Seconds for an upstream to take a connection. How long it may then work is its caller's business."""
KEPT: Final = 1.0
"""Seconds for which an idle connection is used again, which saves 0.5 ms of a request. Servers keep theirs for 5 s and more:
so short a time after its last answer none closes it just while a request is on its way.
"""
_DEAD_AFTER: Final = (30, 10, 3)
"""TCP keep-alive: seconds of silence, seconds between probes, probes. A machine that is gone answers none."""

_HOP_BY_HOP: Final = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade",
})  # fmt: skip
"""RFC 9110, 7.6.1: these concern one connection only, as do those that ``Connection`` names."""
_OURS: Final = frozenset({"host", "expect"})
"""Of a request: made anew, or already answered."""
_NOT_ADDED: Final = (hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE, hdrs.USER_AGENT)
"""What aiohttp would add where the caller has sent none."""

Headers = Iterable[tuple[str, str]]


class Unreachable(BackendFailed):
    """Nobody took the connection: nothing of the request has been used up."""


class UpstreamAnswer:
    """The beginning of an answer, and the way to the rest. ``close`` it, whatever happens: that ends the connection."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.reason = response.reason
        self.headers = end_to_end(response.headers)
        self._response = response
        self._lost = _loss_of(response)
        if self._lost is not None:
            self._lost.add_done_callback(self._on_lost)
        else:
            self._on_lost(None)

    async def read(self) -> bytes:
        """What has come of the body since the last time, waiting for more if need be; empty at its end.

        Raises BackendFailed when it broke off.
        """
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise _broken(error, "in its answer") from None

    def _on_lost(self, _: object) -> None:
        """When what came was no valid chunk, aiohttp forgets to tell whoever reads."""
        content = self._response.content
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError("the connection ended before the answer"))

    def close(self) -> None:
        """Also stops what is still being sent."""
        if self._lost is not None:
            self._lost.remove_done_callback(self._on_lost)
            self._lost = None
        self._response.close()


def _loss_of(response: aiohttp.ClientResponse) -> asyncio.Future[None] | None:
    """Done when the connection of a response ends; None: it has already, or is given back after the whole answer."""
    protocol = response.connection.protocol if response.connection is not None else None
    lost = protocol.closed if protocol is not None else None
    if lost is not None:
        lost.remove_done_callback(_retrieve)  # a connection is used more than once
        lost.add_done_callback(_retrieve)
    return lost


def _retrieve(lost: asyncio.Future[None]) -> None:
    """Else asyncio complains that nobody wanted to know why."""
    if not lost.cancelled():
        lost.exception()


class Forwarder:
    """Makes its session when it is first used, and inside a running loop."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def send(self, url: str, headers: Headers, body: bytes | AsyncIterator[bytes] | None) -> UpstreamAnswer:
        """POST to ``url``, which is sent as it is written, and wait for the answer's headers. ``headers`` are end-to-end
        ones (``end_to_end``); with a Content-Length in them, ``body`` has that length, else it is sent in chunks.

        The answer may come before the body has been sent; the rest of it goes on being sent meanwhile. Raises
        Unreachable, or BackendFailed for everything else that is no whole HTTP answer.
        """
        try:
            response = await self._open().request(
                hdrs.METH_POST,
                URL(url, encoded=True),
                headers=CIMultiDict(headers),
                data=body,
                skip_auto_headers=_NOT_ADDED,
                allow_redirects=False,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            log.warning("an upstream cannot be reached", url=url.partition("?")[0], reason=str(error) or repr(error))
            raise Unreachable("the model's server cannot be reached") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _broken(error, "before its answer") from None
        answer = UpstreamAnswer(response)
        if not 200 <= answer.status <= 599 or any(_is_malformed(value) for _, value in answer.headers):
            answer.close()
            raise BackendFailed("the model's server answered with something that is no HTTP answer")
        return answer

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT, socket_factory=_make_socket),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_LIMIT),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def end_to_end(headers: CIMultiDictProxy[str]) -> list[tuple[str, str]]:
    """The headers that go on to the other side, in their order."""
    dropped = {name.strip().lower() for value in headers.getall(hdrs.CONNECTION, []) for name in value.split(",")}
    dropped |= _HOP_BY_HOP
    if hdrs.TRANSFER_ENCODING in headers:
        dropped.add("content-length")  # RFC 9112, 6.3: it does not count, and must not be passed on
    return [(name, value) for name, value in headers.items() if name.lower() not in dropped]


def request_headers(headers: CIMultiDictProxy[str], request_id: str) -> list[tuple[str, str]]:
    """Those of a caller's request, as an upstream is to get them."""
    kept = [(name, value) for name, value in end_to_end(headers) if name.lower() not in _OURS | {"x-request-id"}]
    return [*kept, ("X-Request-Id", request_id)]


def _is_malformed(value: str) -> bool:
    return any(bad in value for bad in "\r\n\0")


def _broken(error: Exception, where: str) -> BackendFailed:
    log.warning("an upstream broke off", where=where, reason=_words(error))
    return BackendFailed(f"the model's server broke off {where}")


def _words(error: Exception) -> str:
    """What an error says, for the log; only its kind where it may quote: the URL with the caller's query, or the answer."""
    cause = error.__cause__
    if isinstance(error, aiohttp.ClientResponseError | aiohttp.ClientPayloadError) and cause is not None:
        return type(cause).__name__
    return str(error) or repr(error)


def _make_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with contextlib.suppress(OSError, AttributeError):  # not everywhere; the system's own, longer times then hold
        for option, value in zip(("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"), _DEAD_AFTER, strict=True):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made
