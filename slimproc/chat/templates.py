"""Renderer: the front's client of the renderer processes. Renders queue in order; a process that is lost is replaced.

Two processes, both serving: while a slow template holds one (at most ``time_limit``) the other renders for everyone
else, and when the slow one has been killed nobody waits for its successor to start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec

from slimproc.chat.process import Limits, RendererDied, RendererProcess, TookTooLong
from slimproc.chat.protocol import Template, encode
from slimproc.errors import InternalError, InvalidRequest, ShuttingDown, SlimprocError

__all__ = ["Rendered", "Renderer", "RendererStatistics", "Template"]

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class Rendered(msgspec.Struct, frozen=True):
    """A prompt, and where in it control tokens' texts are a caller's words and not control tokens.

    ``literals`` are (start, end) in characters of ``text``, sorted and disjoint.
    """

    text: str
    literals: list[tuple[int, int]]


class RendererStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot. Counts are since the start; ``started`` counts processes."""

    pids: list[int]
    waiting: int
    running: int
    rendered: int
    refused: int
    timed_out: int
    died: int
    started: int


class Renderer:
    """Belongs to one event loop. Between ``start`` and ``close``, ``render`` may be called by any number of tasks."""

    def __init__(
        self,
        *,
        time_limit: float = 0.25,
        memory_limit: int = 600 << 20,
        output_limit: int = 4 << 20,
        prepare_limit: float = 2.0,
        start_limit: float = 10.0,
        processes: int = 2,
    ) -> None:
        """``prepare_limit`` is for compiling a template, which each process does once."""
        self._limits = Limits(
            time=time_limit, prepare=prepare_limit, start=start_limit, memory=memory_limit, output=output_limit
        )
        self._places = processes
        self._idle: list[RendererProcess | None] = []
        """What no render holds; None is a place whose process could not be started. As many as ``_free`` counts."""
        self._free = asyncio.Semaphore(0)  # first come, first served
        self._processes: set[RendererProcess] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._waiting = self._running = 0
        self._rendered = self._refused = self._timed_out = self._died = self._started = 0

    def __repr__(self) -> str:
        return f"<Renderer {self.statistics()}>"

    async def start(self) -> None:
        """Start the processes and wait until they are ready. A place whose process does not start, on a machine that is
        busy or short of processes, stays empty: the first render that gets it tries again.
        """
        started = await asyncio.gather(*(self._start_process() for _ in range(self._places)), return_exceptions=True)
        if self._closed:
            return  # ``close`` has killed them, which is no failure
        for process in started:
            if isinstance(process, InternalError):
                _log.warning("%s; the next render tries again", process)
                self._give_back(None)
            elif isinstance(process, BaseException):
                await self.close()
                raise process
            else:
                self._give_back(process)

    async def close(self) -> None:
        """Kill and reap every process. Renders still waiting or running end with ShuttingDown."""
        self._closed = True
        for process in self._processes:
            process.kill()
        for _ in range(self._waiting):
            self._free.release()
        while self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.gather(*(process.close() for process in self._processes))
        self._processes.clear()

    def statistics(self) -> RendererStatistics:
        return RendererStatistics(
            pids=sorted(process.pid for process in self._processes),
            waiting=self._waiting,
            running=self._running,
            rendered=self._rendered,
            refused=self._refused,
            timed_out=self._timed_out,
            died=self._died,
            started=self._started,
        )

    async def render(self, template: Template, messages: list[dict[str, Any]]) -> Rendered:
        """The prompt for ``messages``, whose roles and shapes have been checked.

        Raises InvalidRequest: the template refuses them, is broken, or passes a limit; InternalError: the process died
        in this render or could not be started; ShuttingDown. Being cancelled disturbs no other render.
        """
        if self._closed:
            raise ShuttingDown("the server is shutting down")
        encoded = _encoded(messages)
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        if self._closed:
            raise ShuttingDown("the server is shutting down")
        # The exchange is a task of its own, which a caller that goes away leaves to end by itself: it has a limit, and
        # its answer is read, so the next render finds the stream in step.
        outcome = await asyncio.shield(self._task(self._serve(self._idle.pop(), template, encoded)))
        if isinstance(outcome, SlimprocError):
            raise outcome
        return outcome

    async def _serve(
        self, process: RendererProcess | None, template: Template, messages: msgspec.Raw
    ) -> Rendered | SlimprocError:
        self._running += 1
        try:
            for last in (False, True):
                if process is None or not process.usable:
                    await self._discard(process)
                    process = None
                    process = await self._start_process()
                try:
                    done = await process.render(template, messages)
                except RendererDied as error:
                    # Dead before it began: it was lost while idle, and this render had no part in it.
                    self._died += 1
                    if error.begun or last:
                        raise
                else:
                    self._rendered += 1
                    return Rendered(done.text, done.literals)
            raise AssertionError("the loop returns or raises")
        except SlimprocError as error:
            self._refused += isinstance(error, InvalidRequest)
            self._timed_out += isinstance(error, TookTooLong)
            return ShuttingDown("the server is shutting down") if self._closed else error
        finally:
            self._running -= 1
            self._give_back(process)

    def _give_back(self, process: RendererProcess | None) -> None:
        if process is not None and not process.usable and not self._closed:
            self._task(self._replace(process))
            return
        self._idle.append(process)
        self._free.release()

    async def _replace(self, process: RendererProcess) -> None:
        _log.info("renderer %d is gone; starting another", process.pid)
        successor = None
        try:
            await self._discard(process)
            successor = await self._start_process()
        except InternalError as error:
            if not self._closed:
                _log.warning("%s; the next render tries again", error)
        finally:
            self._idle.insert(0, successor)  # behind the one that has served: its templates are compiled
            self._free.release()

    async def _start_process(self) -> RendererProcess:
        process = await RendererProcess.spawn(self._limits)
        self._started += 1
        self._processes.add(process)
        if self._closed:
            process.kill()
        try:
            await process.greet()
        except BaseException:
            await self._discard(process)
            raise
        return process

    async def _discard(self, process: RendererProcess | None) -> None:
        if process is not None:
            await process.close()
            self._processes.discard(process)

    def _task(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _encoded(messages: list[dict[str, Any]]) -> msgspec.Raw:
    try:
        return msgspec.Raw(encode(messages))
    except (UnicodeEncodeError, OverflowError, RecursionError, TypeError) as error:
        reason = {UnicodeEncodeError: "half a surrogate pair", RecursionError: "too deep a nesting"}
        raise InvalidRequest(
            f"messages hold {reason.get(type(error), 'a value')} that cannot be rendered", param="messages"
        ) from error
