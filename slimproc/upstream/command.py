"""A server that we start from a command line (``command:``) and stop: any program that serves HTTP on a port it is told."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from slimproc import logs
from slimproc.config.lists import PORT_VARIABLE
from slimproc.replicas.environment import child_environment
from slimproc.replicas.exits import ExitStatus
from slimproc.replicas.life import Life, Post, Refusal, Sighting
from slimproc.replicas.states import ReplicaEvent
from slimproc.upstream import ports
from slimproc.upstream.child import Child
from slimproc.upstream.client import UpstreamClient
from slimproc.upstream.contract import ControlError, Unreachable
from slimproc.upstream.life import Pace, UpstreamLife

log = logs.get("slimproc.upstream")

_PATIENCE = 3
"""Looks in a row that may find it silent or unwell before it is ended and started again."""


@dataclass(frozen=True)
class CommandLine:
    """``argv`` and values of ``env`` may name ``${PORT}``; ``environ`` is our own environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    environ: Mapping[str, str]

    def argv_for(self, port: int) -> list[str]:
        return [argument.replace(PORT_VARIABLE, str(port)) for argument in self.argv]

    def environ_for(self, port: int, device: str | None) -> dict[str, str]:
        """What the configuration sets by itself wins over the device that was chosen."""
        own = {key: value.replace(PORT_VARIABLE, str(port)) for key, value in self.env.items()}
        return child_environment(self.environ, device) | own


class CommandSource:
    """Starts one server after another, each on a port of its own. Nothing of it outlives a life."""

    sighting: Sighting | None = None

    def __init__(
        self,
        name: str,
        client: UpstreamClient,
        line: CommandLine,
        *,
        ready_path: str,
        concurrency: int,
        status_timeout: float,
        pace: Pace | None = None,
        given: ports.Ports | None = None,
    ) -> None:
        """``given``: the ports that others like it have."""
        self.slots = concurrency
        self.name = name
        self.line = line
        self.pace = pace or Pace()
        self.ports = given or ports.Ports()
        self._client = client
        self._ready_path = ready_path
        self._status_timeout = status_timeout

    def start(
        self, *, device: str | None, post: Post, on_slot_free: Callable[[], None], on_news: Callable[[], None]
    ) -> Life:
        """Spawn it. Raises OSError, and then nothing is left over."""
        del on_news
        port = self.ports.take()
        try:
            return CommandLife(self, port, device, post, on_slot_free)
        except OSError:
            self.ports.give_back(port)
            raise

    async def look(self, base_url: str) -> None:
        """Raises ControlError unless ``ready_path`` answers 2xx."""
        code, _ = await self._client.ask("GET", base_url + self._ready_path, self._status_timeout)
        if not 200 <= code < 300:
            raise ControlError(f"{self._ready_path} answers {code}")

    def made_from(self) -> Hashable:
        """Where its program is; None: nowhere."""
        return shutil.which(self.line.argv[0], path=self.line.environ_for(0, None).get("PATH"))

    async def watch(self, on_news: Callable[[], None]) -> None:
        """There is nothing to see between two lives."""


class CommandLife(UpstreamLife):
    """One process group. Its leader is a guard, which ends as the server does and takes everything with it."""

    def __init__(
        self, source: CommandSource, port: int, device: str | None, post: Post, on_slot_free: Callable[[], None]
    ) -> None:
        super().__init__(source.name, f"http://{ports.LOOPBACK}:{port}", source.slots, post, on_slot_free)
        self._source = source
        self._port = port
        self._hurry = asyncio.Event()
        self._child: Child | None = None
        argv, environ = source.line.argv_for(port), source.line.environ_for(port, device)
        if shutil.which(argv[0], path=environ.get("PATH")) is None:
            message = f"the command {argv[0]!r} is not there, or cannot be run"
            asyncio.get_running_loop().call_soon(lambda: self._refuse(message, permanent=True))
            return
        self._child = Child(self.name, argv, environ, self._on_exit, what="the server")
        self.pid = self._child.pid
        self._spawn(self._come_up(self.pid), "start")

    # --- coming up ----------------------------------------------------------------------------------------------------

    async def _come_up(self, session: int) -> None:
        await self._until_it_answers()
        if await self._is_itself(session):
            self._become_ready()
            await self._watch()
        else:
            self.refused = Refusal(f"its port {self._port} is taken by another process")
            self.kill()

    async def _is_itself(self, session: int) -> bool:
        """Whether who answers can be the server. Where that is not seen, it has to stay alive for a while."""
        pace, began = self._source.pace, time.monotonic()
        while (found := await asyncio.to_thread(ports.owner, session, self._port)) is not ports.Owner.OURS:
            if found is ports.Owner.STRANGER:
                return False
            settled = pace.doubtful if found is ports.Owner.OLDER else pace.settle
            if time.monotonic() - began >= settled:
                if sys.platform == "linux":  # elsewhere nobody tells whose a port is
                    words = "a server's port is answered by no process of its own"
                    log.warning(words, replica=self.name, port=self._port)
                break
            await asyncio.sleep(pace.settle / 4)
            await self._until_it_answers()
        return True

    async def _until_it_answers(self) -> None:
        while True:
            try:
                await self._source.look(self.base_url)
            except ControlError:
                await asyncio.sleep(self._source.pace.loading)
            else:
                return

    # --- serving ------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Its death is told by the system; whether it is alive in more than name, by its answers."""
        missed = 0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._source.pace.loading if missed else self._source.pace.serving):
                    await self._hurry.wait()
            self._hurry.clear()
            try:
                await self._source.look(self.base_url)
            except ControlError as error:
                if self.occupied and not isinstance(error, Unreachable):
                    continue  # with work in it, it may just be busy
                missed += 1
                if missed >= _PATIENCE:
                    self._post(ReplicaEvent.STALLED, self, f"the server is not well: {error.reason}")
                    return
            else:
                missed = 0

    def note_unreachable(self, reason: str) -> None:
        del reason  # it lives, or its death would be known: it is looked at now
        self._hurry.set()

    # --- the end ------------------------------------------------------------------------------------------------------

    def _on_exit(self, status: ExitStatus) -> None:
        self._end(str(status))

    def ask_to_exit(self) -> None:
        self._lose_slots("the server is being stopped")
        self.terminate()

    def terminate(self) -> None:
        if self._child is not None:
            self._child.terminate()

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def bury(self, reason: str) -> None:
        super().bury(reason)
        if self._child is not None:
            self._child.close()
        self._source.ports.give_back(self._port)
