"""The front's HTTP client for model servers that are not engines of ours, and its questions to their control endpoints.

Nothing from outside is trusted: answers are bounded in size and time, redirects are not followed, no cookie is kept, no
proxy is taken from the environment, and nothing is decompressed.
"""

from __future__ import annotations

import asyncio
import os
from types import TracebackType
from typing import Final, Self

import aiohttp

from slimproc.upstream import contract
from slimproc.upstream.contract import ContractViolated, NoAnswer, Status, Unreachable, clip

LARGEST_ANSWER: Final = 64 << 10
"""Bytes of a control or health answer."""


def _open_session() -> aiohttp.ClientSession:
    """Each question has a connection of its own. To be called in the loop."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True, use_dns_cache=False)
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
        raise_for_status=False,
        skip_auto_headers=("User-Agent",),
    )


class UpstreamClient:
    """Control and health questions, each on a connection of its own: a kept one that its server has just closed would
    look like a server that breaks off. Opened by the first question; ``close`` it.
    """

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def ask(self, method: str, url: str, limit: float, body: bytes | None = None) -> tuple[int, bytes]:
        """One question within ``limit`` seconds: HTTP status and body. Raises Unreachable, NoAnswer, ContractViolated."""
        if self._session is None:
            self._session = _open_session()
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "slimproc"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            async with asyncio.timeout(limit):
                return await self._exchange(self._session, method, url, body, headers)
        except TimeoutError:
            raise NoAnswer(f"it did not answer within {limit:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise Unreachable(f"it cannot be reached: {_cause(error.os_error)}") from None
        except aiohttp.ClientResponseError as error:
            raise ContractViolated(f"it does not speak HTTP: {clip(error.message)}") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise NoAnswer(f"it broke off: {clip(str(error) or type(error).__name__)}") from None

    async def _exchange(
        self, session: aiohttp.ClientSession, method: str, url: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=None)  # ours is around it
        async with session.request(
            method, url, data=body, headers=headers, allow_redirects=False, timeout=timeout
        ) as answer:
            found = bytearray()
            async for piece in answer.content.iter_any():
                found += piece
                if len(found) > LARGEST_ANSWER:
                    raise ContractViolated(f"its answer is larger than {LARGEST_ANSWER} bytes")
            return answer.status, bytes(found)


def _cause(error: OSError) -> str:
    """The system's own words; what asyncio and name resolution make of them repeats the address, or has no number."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else clip(error.strerror or str(error))


class ControlClient:
    """The control endpoint of one server. Every method raises ``ControlError``s alone."""

    def __init__(self, client: UpstreamClient, base_url: str, *, status_timeout: float) -> None:
        self._client = client
        self._url = f"{base_url}/control/"
        self._status_timeout = status_timeout

    async def status(self, limit: float | None = None) -> Status:
        """Within ``limit`` seconds, and never more than ``status_timeout``."""
        wait = self._status_timeout if limit is None else min(limit, self._status_timeout)
        return contract.read(*await self._client.ask("GET", self._url + "status", wait))

    async def load(self, limit: float) -> Status:
        """Ask for the load. The answer may come before it is done: ``status`` tells."""
        return contract.read(*await self._client.ask("POST", self._url + "load", limit, b"{}"))

    async def unload(self, limit: float) -> Status:
        return contract.read(*await self._client.ask("POST", self._url + "unload", limit, b"{}"))
