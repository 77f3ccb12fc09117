"""Prepare: a command that brings a remote server up (it starts containers, say) and loads nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from slimproc import logs
from slimproc.replicas.environment import child_environment
from slimproc.replicas.exits import ExitStatus
from slimproc.upstream.child import Child

log = logs.get("slimproc.upstream")


class PrepareFailed(Exception):
    """It could not be run, ended badly, or took too long. ``str()`` is for people."""


class Prepare:
    """Never runs twice at once: who asks while it runs waits for the same run. In the folder of argv[0], with our own
    environment. What it leaves running when it has ended well stays; its output goes to our log as long as we live.
    """

    def __init__(self, name: str, argv: tuple[str, ...], environ: Mapping[str, str]) -> None:
        """``argv[0]`` is absolute; ``name`` is whose it is, for the log."""
        self._name = name
        self._argv = argv
        self._environ = child_environment(environ, None)
        self._running: asyncio.Task[None] | None = None
        self._waiting = 0
        """Those who wait for the run that there is."""
        self._child: Child | None = None
        self.runs = 0

    @property
    def running(self) -> bool:
        return self._running is not None and not self._running.done()

    async def run(self, limit: float) -> None:
        """Run it, or wait for the run that there is. Raises PrepareFailed; cancelled, it leaves the run alone."""
        if not self.running:
            self._running = asyncio.create_task(self._once(limit), name=f"prepare {self._name}")
            self._running.add_done_callback(_look_at)
        assert self._running is not None
        self._waiting += 1
        try:
            await asyncio.shield(self._running)
        finally:
            self._waiting -= 1

    async def _once(self, limit: float) -> None:
        self.runs += 1
        self._forget_last()
        ended: asyncio.Future[ExitStatus] = asyncio.get_running_loop().create_future()
        folder = str(Path(self._argv[0]).parent)
        log.info("preparing a server", replica=self._name, command=self._argv[0])
        try:
            child = self._child = Child(
                self._name, self._argv, self._environ, ended.set_result, what="prepare", cwd=folder, keep=True
            )
        except OSError as error:
            raise PrepareFailed(f"prepare could not be run: {error.strerror}") from None
        try:
            async with asyncio.timeout(limit):
                status = await asyncio.shield(ended)
        except TimeoutError:
            child.kill()
            await ended
            raise PrepareFailed(f"prepare was not done within {limit:g} s, and was killed") from None
        if status.code != 0:
            raise PrepareFailed(str(status))

    def _forget_last(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def leave(self) -> None:
        """Of those who wait, one is about to be cancelled: kill the run unless others wait for it, too."""
        if self._waiting <= 1:
            self.kill()

    def kill(self) -> None:
        """A run that is under way, with all that it has started."""
        if self._child is not None and self.running:
            self._child.kill()


def _look_at(task: asyncio.Task[None]) -> None:
    """Its failure is told to those who wait; where nobody does any more, that is no mistake of ours."""
    if not task.cancelled():
        task.exception()
