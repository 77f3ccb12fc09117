"""RemoteLife: a remote server in use: loaded or adopted, watched, drained, unloaded.

It can be asked and cannot be killed. Only a valid ``unloaded`` ends an unload; one that fails keeps the life, with
``unload_failed``, until the server says that it holds nothing, or is found ready or failed some time later: then this use of
it is over all the same, and its ``Sighting`` says what it is: ``ready`` can be adopted anew, ``failed`` keeps its hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from slimproc import logs
from slimproc.replicas.life import Post
from slimproc.upstream.contract import ContractViolated, ControlError, Status, Unreachable
from slimproc.upstream.life import UpstreamLife
from slimproc.upstream.loading import Loading, LoadRefused
from slimproc.upstream.remote_server import RemoteServer
from slimproc.upstream.slot import UpstreamSlot
from slimproc.upstream.unloading import UnloadRefused, unload

log = logs.get("slimproc.upstream")

PATIENCE = 3
"""Looks in a row that may come to nothing while nothing is forwarded; with work in it, it may just be busy."""

_SETTLED = ("ready", "failed")
"""States that do not pass by themselves."""


class RemoteLife(UpstreamLife):
    """See the module."""

    killable = False

    def __init__(
        self,
        server: RemoteServer,
        concurrency: int,
        post: Post,
        on_slot_free: Callable[[], None],
        on_news: Callable[[], None],
    ) -> None:
        super().__init__(server.name, server.base_url, concurrency, post, on_slot_free)
        self._server = server
        self._on_news = on_news
        self._loading = Loading(server)
        self._hurry = asyncio.Event()
        self._draining = False
        self._exiting = False
        self._releases = 0
        self._active: int | None = None
        """Requests in it by its own count, in an answer to a question from after our last one ended; else None."""
        server.free.clear()
        self._main = self._spawn(self._live(), "watch")

    async def _live(self) -> None:
        try:
            await self._loading.run()
        except LoadRefused as error:
            self._refuse(str(error), permanent=error.permanent)
            return
        self._become_ready()
        await self._watch()

    # --- serving ------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        silent = 0
        while not self.ended:
            await self._pause()
            releases = self._releases
            try:
                status = await self._server.read()
            except (Unreachable, ContractViolated) as error:
                self._doubt(f"{self.base_url}: {error.reason}")
            except ControlError as error:
                silent += 1
                if silent >= PATIENCE and not self.occupied:
                    self._doubt(f"{self.base_url}: {error.reason}")
            else:
                silent = 0
                self._hear(status, current=releases == self._releases)

    def _hear(self, status: Status, *, current: bool) -> None:
        """``current``: nothing of ours has ended since it was asked."""
        if not status.ready:
            error = f": {status.last_error.message}" if status.last_error else ""
            self._end(f"{self.base_url}: it is {status.state}{error}")
            return
        self._trust()
        if current:
            self._note_active(status.active_requests)

    async def _pause(self) -> None:
        pace = self._server.pace
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pace.draining if self._draining else pace.serving):
                await self._hurry.wait()
        self._hurry.clear()

    def _note_active(self, active: int) -> None:
        before, self._active = self.drained, active
        if self._draining and self.drained and not before:
            self._on_slot_free()

    @property
    def drained(self) -> bool:
        """Nothing of ours is in it, and it says that nothing of anybody's is."""
        return not self._taken and self._active == 0

    def drain(self, *, begin: bool) -> None:
        self._draining = begin
        if begin:
            self._active = None
            self._hurry.set()

    def give_back(self, slot: UpstreamSlot) -> None:
        self._releases += 1
        self._active = None
        if self._draining:
            self._hurry.set()
        super().give_back(slot)

    def note_unreachable(self, reason: str) -> None:
        del reason  # its control endpoint says what is so
        self._hurry.set()

    # --- the end ------------------------------------------------------------------------------------------------------

    def ask_to_exit(self) -> None:
        """Unload, unless nothing can have been loaded."""
        if self.ended or self._exiting:
            return
        self._exiting = True
        self._main.cancel()
        if self.is_ready or self._loading.posted or self._server.sighting.state not in ("unloaded", "unknown"):
            self._lose_slots("the model is being unloaded")
            self._spawn(self._leave(), "unload")
        else:
            self._end("it was not loaded")

    async def _leave(self) -> None:
        try:
            await unload(self._server)
        except UnloadRefused as error:
            self.unload_failed = f"{self.base_url}: {error}"
            log.warning("a model could not be unloaded", replica=self.name, reason=self.unload_failed)
            self._on_news()
            await self._until_let_go()
        self._end("it was unloaded")

    async def _until_let_go(self) -> None:
        """After an unload that failed: until it is unloaded by its own word, or is found settled in something else."""
        began = time.monotonic()
        while True:
            await asyncio.sleep(self._server.pace.stuck)
            with contextlib.suppress(ControlError):
                status = await self._server.read()
                if status.unloaded:
                    return
                if status.state in _SETTLED and time.monotonic() - began >= self._server.pace.given_up:
                    return

    def kill(self) -> None:
        """It is not ours to kill; a run of ``prepare`` that it alone waits for is."""
        if self._loading.preparing and self._server.prepare is not None:
            self._server.prepare.leave()

    def let_go(self) -> None:
        """Leave it as it is: loaded, loading or whatever."""
        self.kill()
        self._main.cancel()
        for task in self._tasks:
            task.cancel()
        self._end("it is left as it is")

    def _end(self, reason: str) -> None:
        super()._end(reason)
        self._server.free.set()
