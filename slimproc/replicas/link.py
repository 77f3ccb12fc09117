"""EngineLink: the front's conversation with one engine incarnation: commands down, reports up, frames off the ring."""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec

from slimproc.errors import RingCorrupt
from slimproc.ipc import wire
from slimproc.ipc.control import ControlClosed, ControlCorrupt
from slimproc.replicas.process import EngineProcess
from slimproc.stream import Flushable

FRAMES_PER_WAKEUP = 32
"""Without a bound a full ring drains in two or three turns of the loop that each last 0.2 s and more. The ring also stops
a turn after a millisecond; below that, more frames mean fewer writes of a stream's joined text."""


class Listener(Protocol):
    """Who hears an engine: its replica. All are called in the loop, none may wait. RingCorrupt, raised by any of the first
    three, ends the conversation, and comes back in ``on_corrupt``.
    """

    def on_report(self, report: wire.Report) -> None: ...
    def on_step(self, step: wire.Step, gathering: list[Flushable] | None) -> None: ...
    def on_event(self, event: wire.Event) -> None: ...
    def on_corrupt(self, error: RingCorrupt) -> None: ...


class EngineLink:
    """Registers the process's descriptors with the loop, and unregisters them all in ``close``."""

    def __init__(self, process: EngineProcess, listener: Listener) -> None:
        self._loop = asyncio.get_running_loop()
        self._control = process.control
        self._reader = process.reader
        self._listener = listener
        self._gathering: list[Flushable] = []
        self._again: asyncio.Handle | None = None
        self._listening = True
        self._closed = False
        self._loop.add_reader(self._control.fd, self._on_control)
        self._loop.add_reader(self._reader.fd, self._on_credit)

    # --- commands -----------------------------------------------------------------------------------------------

    def send(self, command: wire.Command) -> None:
        """Never waits. To a dead engine it says nothing: whoever listens to its exit does what there is to do."""
        if self._closed:
            return  # a writer that is added now would be waited for on a descriptor that is closed: libuv aborts
        try:
            self._control.send(wire.encode(command))
        except ControlClosed:
            return
        if self._control.unsent:
            self._loop.add_writer(self._control.fd, self._on_writable)

    def _on_writable(self) -> None:
        try:
            done = self._control.flush()
        except ControlClosed:
            done = True
        if done:
            self._loop.remove_writer(self._control.fd)

    # --- reports ------------------------------------------------------------------------------------------------

    def _on_control(self) -> None:
        try:
            for message in self._control.receive():
                self._listener.on_report(wire.decode_report(message))
        except ControlClosed:
            self._loop.remove_reader(self._control.fd)
        except (RingCorrupt, ControlCorrupt, msgspec.MsgspecError) as error:
            self._stop_hearing()
            corrupt = RingCorrupt(f"the control socket carried nonsense: {error}")
            self._listener.on_corrupt(error if isinstance(error, RingCorrupt) else corrupt)

    # --- frames -------------------------------------------------------------------------------------------------

    def _on_credit(self) -> None:
        if self._again is not None:
            # New credit woke us while a turn of ours is due: one turn at a time, or they would multiply.
            self._again.cancel()
            self._again = None
        more = self._drain(FRAMES_PER_WAKEUP)
        if self._reader.ended:
            self._loop.remove_reader(self._reader.fd)  # a pipe without a writer is readable for ever
        if more and self._listening:
            self._again = self._loop.call_soon(self._on_credit)

    def _drain(self, budget: int) -> bool:
        try:
            return self._reader.drain(self._on_frame, budget)
        except (RingCorrupt, msgspec.MsgspecError) as error:
            self._stop_hearing()
            corrupt = error if isinstance(error, RingCorrupt) else RingCorrupt(f"a frame does not decode: {error}")
            self._listener.on_corrupt(corrupt)
            return False
        finally:
            gathered, self._gathering = self._gathering, []
            for stream in gathered:
                stream.flush()

    def _on_frame(self, kind: int, payload: bytes, alone: bool) -> None:  # noqa: FBT001  # the hot path
        if kind == wire.STEP:
            self._listener.on_step(wire.decode_step(payload), None if alone else self._gathering)
        elif kind == wire.EVENT:
            self._listener.on_event(wire.decode_event(payload))
        else:
            raise RingCorrupt(f"frame type {kind} is not one of ours")

    # --- the end ------------------------------------------------------------------------------------------------

    def drain_what_is_left(self) -> None:
        """After the engine's death: everything it published is delivered before anything is failed."""
        while self._listening and self._drain(FRAMES_PER_WAKEUP):
            pass
        if self._listening:
            self._on_control()

    def _stop_hearing(self) -> None:
        """After nonsense nothing more is believed: there is no resynchronisation."""
        if self._listening:
            self._listening = False
            self._loop.remove_reader(self._reader.fd)
            self._loop.remove_reader(self._control.fd)

    def close(self) -> None:
        self._closed = True
        self._stop_hearing()
        self._loop.remove_reader(self._control.fd)
        self._loop.remove_writer(self._control.fd)
        if self._again is not None:
            self._again.cancel()
            self._again = None
