"""Loading: from whatever a remote server is now to ready, within its limits."""

from __future__ import annotations

import asyncio
import contextlib
import time

from slimproc.upstream.contract import (
    ContractViolated,
    ControlError,
    ControlRefused,
    NoAnswer,
    Status,
    Unreachable,
)
from slimproc.upstream.prepare import PrepareFailed
from slimproc.upstream.remote_server import RemoteServer

_GONE = 2
"""Looks in a row that find nobody there: the server has died in its load."""


class LoadRefused(Exception):
    """It did not become ready. ``permanent``: the server was asked to load and failed, and is not asked again by itself."""

    def __init__(self, reason: str, *, permanent: bool = False) -> None:
        super().__init__(reason)
        self.permanent = permanent


class Loading:
    """One load. A server that is ready already is taken as it is; one that somebody else has begun to load is waited for."""

    def __init__(self, server: RemoteServer) -> None:
        self._server = server
        self.preparing = False
        """It waits for ``prepare``."""
        self.posted = False
        """It was asked to load, so that it may be doing so."""

    async def run(self) -> None:
        """Raises LoadRefused."""
        status = await self._find()
        if not status.ready:
            await self._load(status)

    # --- the control endpoint -----------------------------------------------------------------------------------------

    async def _find(self) -> Status:
        """Its first answer; where there is none, after ``prepare``."""
        server = self._server
        try:
            return await server.read()
        except (Unreachable, NoAnswer) as error:  # a container without its server may take connections and drop them
            if server.prepare is None:
                raise self._refused(error.reason) from None
        except ControlError as error:
            raise self._refused(error.reason) from None
        deadline = time.monotonic() + server.limits.prepare_timeout
        self.preparing = True
        try:
            await server.prepare.run(server.limits.prepare_timeout)
        except PrepareFailed as error:
            raise self._refused(str(error)) from None
        finally:
            self.preparing = False
        while True:
            try:
                return await server.read()
            except ControlError as error:  # whatever it is, it may still be coming up
                if time.monotonic() >= deadline:
                    limit = server.limits.prepare_timeout
                    raise self._refused(f"{error.reason}, {limit:g} s after prepare was begun") from None
            await asyncio.sleep(server.pace.loading)

    def _refused(self, reason: str, *, permanent: bool = False) -> LoadRefused:
        return LoadRefused(f"{self._server.base_url}: {reason}", permanent=permanent)

    # --- the load -----------------------------------------------------------------------------------------------------

    async def _load(self, found: Status) -> None:
        limit = self._server.limits.load_timeout
        deadline = time.monotonic() + limit
        status: Status | None = found
        asking: asyncio.Task[Status] | None = None
        absent = 0
        try:
            while status is None or not status.ready:
                if status is not None and asking is None and status.state in ("unloaded", "failed"):
                    asking = self._ask(status, limit)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._refused(f"the model did not load within {limit:g} s", permanent=True)
                if asking is None:
                    await asyncio.sleep(min(self._server.pace.loading, left))
                elif await _done(asking, min(self._server.pace.loading, left)):
                    status, asking = await self._hear(asking), None
                    continue
                if left < self._server.pace.loading:
                    continue  # a look that the limit cuts short would say that nobody answers
                seen, absent = await self._look(left, absent)
                if seen is not None and (asking is None or seen.ready):
                    status = seen  # while its answer is due, only that it is ready counts
        finally:
            if asking is not None:
                asking.cancel()
            self._server.note_load_over()

    def _ask(self, status: Status, limit: float) -> asyncio.Task[Status]:
        if self.posted:
            said = status.last_error
            reason = f": {said.code}: {said.message}" if said else ""
            raise self._refused(f"its load ended as {status.state}{reason}", permanent=True)
        self.posted = True
        self._server.note_load_asked()
        return asyncio.create_task(self._server.control.load(limit), name=f"load {self._server.name}")

    async def _hear(self, asking: asyncio.Task[Status]) -> Status | None:
        """The answer to the load; None where there is none, and its status has to tell."""
        self._server.note_load_over()
        try:
            status = asking.result()
        except NoAnswer:
            return None
        except ControlRefused as error:
            with contextlib.suppress(ControlError):
                await self._server.read()  # it has said that it does not load, and not what it has in memory
            raise self._refused(f"it refused to load: {error.reason}", permanent=error.code != "BUSY") from None
        except ControlError as error:
            raise self._refused(error.reason) from None
        self._server.note_answer(status)
        return status

    async def _look(self, limit: float, absent: int) -> tuple[Status | None, int]:
        """Its status, if it tells it, and how often in a row nobody was there. A server that loads may be silent."""
        try:
            return await self._server.read(limit), 0
        except Unreachable as error:
            if absent + 1 >= _GONE:
                raise self._refused(f"it has gone in its load: {error.reason}") from None
            return None, absent + 1
        except ContractViolated as error:
            raise self._refused(error.reason) from None
        except ControlError:
            return None, 0


async def _done(task: asyncio.Task[Status], limit: float) -> bool:
    await asyncio.wait({task}, timeout=limit)
    return task.done()
