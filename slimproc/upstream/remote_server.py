"""RemoteServer: one server with the control contract that lives without us, and what is known of it.

What it has in memory is its own word: the last good status counts, and an attempt that fails replaces nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from slimproc import logs
from slimproc.replicas.life import Sighting
from slimproc.upstream.client import ControlClient, UpstreamClient
from slimproc.upstream.contract import ControlError, Status, clip
from slimproc.upstream.life import Pace
from slimproc.upstream.prepare import Prepare

log = logs.get("slimproc.upstream")


@dataclass(frozen=True)
class RemoteLimits:
    """Seconds."""

    load_timeout: float
    """From the control endpoint's first answer to ready."""
    unload_timeout: float
    prepare_timeout: float
    """For a run of ``prepare``, and until the control endpoint answers after it."""
    status_timeout: float


class RemoteServer:
    """Every answer of the server, to whomever, is remembered here. ``on_news`` is called when that changes anything."""

    def __init__(
        self,
        name: str,
        client: UpstreamClient,
        base_url: str,
        limits: RemoteLimits,
        *,
        prepare: Prepare | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.name = name
        self.base_url = base_url
        self.limits = limits
        self.prepare = prepare
        self.pace = pace or Pace()
        self.control = ControlClient(client, base_url, status_timeout=limits.status_timeout)
        self.sighting = Sighting("unknown", reason=f"{base_url}: it has not been asked yet")
        self.free = asyncio.Event()
        """No life of it asks for its status: somebody else has to."""
        self.on_news: Callable[[], None] = lambda: None
        self._loading = False
        """It was asked to load, and has not answered that: until then nothing that it says means that it has no memory."""
        self._asked = 0
        self._known = 0
        """The number of the question whose answer is known: an older one that comes later is dropped."""

    async def read(self, limit: float | None = None) -> Status:
        """Ask for its status, for at most ``limit`` seconds (never more than ``status_timeout``). Raises ControlError."""
        self._asked += 1
        number = self._asked
        try:
            status = await self.control.status(limit)
        except ControlError as error:
            if number > self._known:
                self._known = number
                self._note_silence(error.reason)
            raise
        if number > self._known:
            self._known = number
            self._note(status)
        return status

    def note_answer(self, status: Status) -> None:
        """What it has just answered to a load or an unload."""
        self._outdate()
        self._note(status)

    def note_load_asked(self) -> None:
        """It is being asked to load: whether it answers or not, it may take memory from now on."""
        self._loading = True
        self._outdate()
        self._see(replace(self.sighting, residency="unknown", let_go=False))

    def note_load_over(self) -> None:
        """Its answer to the load has come, or is not waited for any longer: what it says from now on counts again."""
        if self._loading:
            self._loading = False
            self._outdate()

    def _outdate(self) -> None:
        """What it was asked before and has not answered yet tells nothing any more."""
        self._asked += 1
        self._known = self._asked

    def _note(self, status: Status) -> None:
        error = status.last_error
        last = (clip(error.code), clip(error.message)) if error else None
        reason = ": ".join(last) if last and status.state == "failed" else ""
        let_go = status.unloaded and not self._loading
        self._see(Sighting(status.state, status.residency, reason, last, asked=True, let_go=let_go))

    def _note_silence(self, reason: str) -> None:
        self._see(replace(self.sighting, state="unknown", reason=f"{self.base_url}: {reason}", asked=True))

    def _see(self, seen: Sighting) -> None:
        before, self.sighting = self.sighting, seen
        if seen == before:
            return
        if (seen.state, seen.reason) != (before.state, before.reason):
            log.info("a server is seen", replica=self.name, state=seen.state, reason=seen.reason or None)
        self.on_news()
