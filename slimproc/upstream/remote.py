"""RemoteSource: the lives of a replica that is a remote server with the control contract, and a look at it between them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Hashable

from slimproc.replicas.life import Life, Post, Sighting
from slimproc.upstream.contract import ControlError
from slimproc.upstream.remote_life import RemoteLife
from slimproc.upstream.remote_server import RemoteServer


class RemoteSource:
    """Nothing is loaded twice: a life adopts a server that is ready, and ``sighting`` says when it is without a life."""

    def __init__(self, server: RemoteServer, concurrency: int) -> None:
        self.slots = concurrency
        self._server = server
        server.free.set()

    @property
    def sighting(self) -> Sighting:
        return self._server.sighting

    def start(
        self, *, device: str | None, post: Post, on_slot_free: Callable[[], None], on_news: Callable[[], None]
    ) -> Life:
        """Adopt it as it is, if it is ready; else prepare it where it is not there, and load it."""
        del device  # it is where it is
        return RemoteLife(self._server, self.slots, post, on_slot_free, on_news)

    def made_from(self) -> Hashable:
        """It is made from nothing of ours."""
        return None

    async def watch(self, on_news: Callable[[], None]) -> None:
        """Reconcile: ask for its status at once, then every few seconds while no life does. Never runs ``prepare``."""
        server = self._server
        server.on_news = on_news
        while True:
            await server.free.wait()
            with contextlib.suppress(ControlError):
                await server.read()
            await asyncio.sleep(server.pace.between)
