"""A server that is simply there (``contract: none``): no lifecycle, and it can serve while its health path answers 2xx."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Hashable

from slimproc.replicas.life import Life, Post, Sighting
from slimproc.replicas.restart import RestartPolicy
from slimproc.upstream.client import UpstreamClient
from slimproc.upstream.contract import ControlError, NoAnswer
from slimproc.upstream.life import Pace, UpstreamLife

PATIENCE = 2
"""Looks in a row that may be left unanswered by a server that is not known to be busy."""


def endless_policy() -> RestartPolicy:
    """It is not ours to give up; when it comes back, it is noticed at most 5 s later."""
    return RestartPolicy(first_wait=0.5, longest_wait=4.0, endless=True)


class PlainSource:
    """Connections to one server, one after another. What it has in memory is its own affair."""

    sighting: Sighting | None = None

    def __init__(
        self,
        name: str,
        client: UpstreamClient,
        base_url: str,
        *,
        health_path: str,
        concurrency: int,
        status_timeout: float,
        pace: Pace | None = None,
    ) -> None:
        self.slots = concurrency
        self.name = name
        self.base_url = base_url
        self.pace = pace or Pace()
        self._client = client
        self._health_path = health_path
        self._status_timeout = status_timeout

    def start(
        self, *, device: str | None, post: Post, on_slot_free: Callable[[], None], on_news: Callable[[], None]
    ) -> Life:
        """Look at it once: it is ready, or the life is over."""
        del device, on_news
        return PlainLife(self, post, on_slot_free)

    async def look(self) -> None:
        """Raises ControlError unless it is well."""
        code, _ = await self._client.ask("GET", self.base_url + self._health_path, self._status_timeout)
        if not 200 <= code < 300:
            raise ControlError(f"{self._health_path} answers {code}")

    def made_from(self) -> Hashable:
        """It is made from nothing of ours."""
        return None

    async def watch(self, on_news: Callable[[], None]) -> None:
        """Between lives nothing is looked at: a life begins with a look."""


class PlainLife(UpstreamLife):
    """Ready from the first good look to the first bad one, and the end of what is in it then."""

    def __init__(self, source: PlainSource, post: Post, on_slot_free: Callable[[], None]) -> None:
        super().__init__(source.name, source.base_url, source.slots, post, on_slot_free)
        self._source = source
        self._hurry = asyncio.Event()
        self._spawn(self._live(), "watch")

    async def _live(self) -> None:
        try:
            await self._source.look()
        except ControlError as error:
            self._refuse(f"{self.base_url}: {error.reason}")
            return
        self._become_ready()
        await self._watch()

    async def _watch(self) -> None:
        unanswered = 0
        while not self.ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._source.pace.serving):
                    await self._hurry.wait()
            self._hurry.clear()
            try:
                await self._source.look()
            except NoAnswer as error:
                unanswered += 1
                if unanswered >= PATIENCE and not self.occupied:  # with work in it, it may just be busy
                    self._doubt(f"{self.base_url}: {error.reason}")
            except ControlError as error:
                self._doubt(f"{self.base_url}: {error.reason}")
            else:
                unanswered = 0
                self._trust()

    def note_unreachable(self, reason: str) -> None:
        self._doubt(f"{self.base_url}: {reason}")
        self._hurry.set()

    def ask_to_exit(self) -> None:
        self._end("it is not used any more")

    def kill(self) -> None:
        """What it is stays as it is: only our use of it ends."""
        self._end("it is not used any more")
