"""RendererProcess: one renderer as the front holds it: started, asked one thing at a time, killed when it overstays."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import sys
from pathlib import Path
from typing import Final

import msgspec

from slimproc.chat.protocol import (
    HEADER,
    Answer,
    Began,
    Done,
    Hello,
    Refused,
    Render,
    Template,
    Unknown,
    decode_answer,
    frame,
)
from slimproc.errors import InternalError, InvalidRequest

_GRACE: Final = 0.02
"""Seconds in which an answer that has already arrived is still read, should the loop itself have been late."""

_REAP_LIMIT: Final = 5.0
"""Seconds that a killed child may take to be gone; the kernel needs milliseconds."""

_log = logging.getLogger(__name__)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds and bytes. ``prepare`` is for compiling a template once; ``start`` for the process to say hello."""

    time: float
    prepare: float
    start: float
    memory: int
    output: int


class TookTooLong(InvalidRequest):
    """The render was cut off, and its process with it."""


class RendererDied(InternalError):
    """The process is gone. ``begun``: it died of, or in, this render; otherwise another process may try."""

    def __init__(self, *, begun: bool) -> None:
        super().__init__("the chat renderer died while it rendered this request")
        self.begun = begun


class RendererProcess:
    """Used by one task at a time. Whatever ends a render early kills the process, so no answer is ever left unread."""

    def __init__(self, process: asyncio.subprocess.Process, channel: socket.socket, limits: Limits) -> None:
        """Follow with ``greet``."""
        self._process = process
        self._channel = channel
        self._limits = limits
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._number = 0
        self._usable = True

    @classmethod
    async def spawn(cls, limits: Limits) -> RendererProcess:
        """Start a process. Raises InternalError."""
        ours, theirs = socket.socketpair()
        seconds = math.ceil(limits.prepare + limits.time) + 5
        command = [sys.executable, "-P", "-m", "slimproc.chat.renderer"]
        command += map(str, (limits.memory, limits.output, seconds))
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=theirs.fileno(),
                stdout=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is for the front
                env=_environment(),
            )
        except OSError as error:
            ours.close()
            raise InternalError(f"the chat renderer could not be started: {error.strerror}") from error
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(process, ours, limits)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def usable(self) -> bool:
        """False once it was killed, ended itself or was seen dead."""
        return self._usable and self._process.returncode is None

    async def greet(self) -> None:
        """Wait until it is ready. Raises InternalError; the process is then to be closed."""
        answer = None
        with contextlib.suppress(OSError, EOFError, msgspec.MsgspecError):
            if self.usable:  # else it was closed before, and so was its socket
                self._reader, self._writer = await asyncio.open_connection(sock=self._channel)
            if self.usable:
                answer = await self._within(self._limits.start)
        if not isinstance(answer, Hello):
            self.kill()
            raise InternalError("the chat renderer could not be started: it did not say hello in time")

    async def render(self, template: Template, messages: msgspec.Raw) -> Done:
        """Raises InvalidRequest (a refusal; TookTooLong) and RendererDied."""
        assert self.usable
        self._number += 1
        begun = False
        try:
            answer = await self._ask(Render(self._number, template.key, messages))
            if isinstance(answer, Unknown):
                answer = await self._ask(Render(self._number, template.key, messages, template))
            if isinstance(answer, Began):
                begun = True
                answer = await self._within(self._limits.time)
        except (OSError, EOFError, msgspec.MsgspecError):
            self.kill()
            raise RendererDied(begun=begun) from None
        except BaseException:
            self.kill()
            raise
        return self._outcome(answer, begun=begun)

    def kill(self) -> None:
        self._usable = False
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """Kill it if it runs, reap it and close its socket."""
        self.kill()
        if self._writer is None:
            self._channel.close()
        else:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        try:
            async with asyncio.timeout(_REAP_LIMIT):
                await self._process.wait()
        except TimeoutError:
            _log.error("renderer %d was killed %.0f s ago and is still there", self.pid, _REAP_LIMIT)

    def _outcome(self, answer: Answer | None, *, begun: bool) -> Done:
        match answer:
            case Done(number=self._number):
                return answer
            case Refused(number=self._number):
                self._usable = not answer.spent
                raise InvalidRequest(answer.message, param="messages")
            case None:
                self.kill()
                limit, verb = (self._limits.time, "") if begun else (self._limits.prepare, " to compile")
                raise TookTooLong(f"the chat template took longer than {limit * 1000:.0f} ms{verb}", param="messages")
            case _:  # an answer to something else: the stream cannot be trusted any more
                self.kill()
                raise RendererDied(begun=begun)

    async def _ask(self, render: Render) -> Answer | None:
        assert self._writer is not None
        self._writer.write(frame(render))
        return await self._within(self._limits.prepare)

    async def _within(self, seconds: float) -> Answer | None:
        """The next answer; None when it does not come in time."""
        reading = asyncio.ensure_future(self._receive())
        try:
            for limit in (seconds, _GRACE):
                done, _ = await asyncio.wait({reading}, timeout=limit)
                if done:
                    return reading.result()
            return None
        finally:
            reading.cancel()

    async def _receive(self) -> Answer:
        assert self._reader is not None
        size = int.from_bytes(await self._reader.readexactly(HEADER))
        # A literal span is at most 11 bytes and at least 3 characters of text; a longer answer is not ours.
        if size > 8 * self._limits.output + 65536:
            raise EOFError
        return decode_answer(await self._reader.readexactly(size))


def _environment() -> dict[str, str]:
    # What python needs to start and the local time zone, and nothing else: templates are not to find keys here.
    kept = ("TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME")
    return {name: os.environ[name] for name in kept if name in os.environ} | {
        "PYTHONPATH": str(Path(__file__).parents[2])
    }
