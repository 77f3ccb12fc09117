"""EngineLink over a real ring and a real socket, with the test at the engine's end."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from slimproc.errors import RingCorrupt
from slimproc.ipc import wire
from slimproc.ipc.control import ControlSocket
from slimproc.ipc.credit import create_credit
from slimproc.ipc.region import create_region
from slimproc.ipc.ring import RingReader, RingWriter
from slimproc.replicas.link import FRAMES_PER_WAKEUP, EngineLink
from tests.fakes import eventually, looped, turns

CREDITS = ["eventfd", "pipe"] if hasattr(os, "eventfd") else ["pipe"]


class Ear:
    """Hears an engine; counts the frames of each turn of the loop."""

    def __init__(self) -> None:
        self.reports: list[wire.Report] = []
        self.steps: list[tuple[wire.Step, list | None]] = []
        self.events: list[wire.Event] = []
        self.corrupt: list[RingCorrupt] = []
        self.flushed: list[int] = []

    def on_report(self, report: wire.Report) -> None:
        self.reports.append(report)

    def on_step(self, step: wire.Step, gathering: list | None) -> None:
        self.steps.append((step, gathering))
        if gathering is not None:
            gathering.append(self)

    def on_event(self, event: wire.Event) -> None:
        self.events.append(event)

    def on_corrupt(self, error: RingCorrupt) -> None:
        self.corrupt.append(error)

    def flush(self) -> None:
        self.flushed.append(len(self.steps))


class Rig:
    """``open`` inside the loop."""

    def __init__(self, credit: str) -> None:
        self.data, self.space = create_credit(credit), create_credit(credit)
        region = create_region(1 << 16, epoch=3, replica=0, credit=credit)
        self.reader = RingReader(region, self.data.reader, self.space.writer, epoch=3)
        self.writer = RingWriter(region, self.data.writer, self.space.reader)
        os.close(region)
        ours, theirs = socket.socketpair()
        self.control, self.engine, self.raw = ControlSocket(ours), ControlSocket(theirs), theirs
        self.ear = Ear()

    def open(self) -> EngineLink:
        self.link = EngineLink(SimpleNamespace(control=self.control, reader=self.reader), self.ear)
        return self.link

    def publish(self, count: int = 1) -> None:
        for number in range(count):
            assert self.writer.put(wire.STEP, wire.encode(wire.Step(number, [wire.Tok(1, "x")])))
        self.writer.commit()

    def close(self) -> None:
        self.reader.close()
        self.writer.close()
        self.control.close()
        self.engine.close()
        self.data.close()
        self.space.close()


@pytest.fixture(params=CREDITS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(request.param)
    yield rig
    rig.close()


@looped
async def test_a_frame_that_is_alone_is_written_at_once_and_others_are_gathered_and_flushed_once(rig):
    link = rig.open()
    rig.publish()
    await eventually(lambda: len(rig.ear.steps) == 1, "the one")
    assert rig.ear.steps[0][1] is None
    assert rig.ear.flushed == []
    rig.publish(3)
    await eventually(lambda: len(rig.ear.steps) == 4, "the three")
    assert all(gathering is not None for _, gathering in rig.ear.steps[1:])
    assert rig.ear.flushed == [4, 4, 4]
    link.close()


@looped
async def test_a_full_ring_is_drained_in_bounded_turns_that_do_not_multiply_when_more_comes(rig):
    """Whatever arrives meanwhile, a turn of the loop reads one portion: others get theirs."""
    link = rig.open()
    rig.publish(600)
    last, most = 0, 0
    for _ in range(400):
        await asyncio.sleep(0)
        if rig.writer.fits(100):
            rig.publish()
        most, last = max(most, len(rig.ear.steps) - last), len(rig.ear.steps)
    assert last > 600
    assert most <= 2 * FRAMES_PER_WAKEUP, "one by the descriptor and one by our own reminder, at the very most"
    link.close()
    await turns()


@looped
async def test_after_close_nothing_is_heard_also_not_what_was_due(rig):
    link = rig.open()
    rig.publish(100)
    await eventually(lambda: rig.ear.steps, "the first portion")
    rig.publish(100)
    link.close()
    heard = len(rig.ear.steps)
    await turns(10)
    assert len(rig.ear.steps) == heard


@looped
async def test_what_a_dead_engine_had_published_is_all_delivered(rig):
    link = rig.open()
    rig.publish(500)
    rig.engine.send(wire.encode(wire.LoadRefused("last words", permanent=True)))
    rig.engine.close()
    link.drain_what_is_left()
    assert len(rig.ear.steps) == 500
    assert rig.ear.reports == [wire.LoadRefused("last words", permanent=True)]
    link.close()


@looped
async def test_the_end_of_the_other_side_costs_no_turns(rig):
    """A closed socket and a pipe without a writer are readable for ever: they are no longer watched."""
    link = rig.open()
    rig.writer.close()
    rig.data.close_writer()
    rig.engine.close()
    await turns(10)
    assert not asyncio.get_running_loop().remove_reader(rig.control.fd)
    if rig.reader.ended:
        assert not asyncio.get_running_loop().remove_reader(rig.reader.fd)
    link.send(wire.Cancel(1))
    link.close()


@pytest.mark.parametrize(
    "nonsense", [struct.pack("<I", 3) + b"\xc1\xc1\xc1", struct.pack("<I", 0xFFFFFFFF)], ids=["message", "length"]
)
@looped
async def test_nonsense_on_the_control_socket_is_told_once_and_nothing_is_believed_after_it(rig, nonsense):
    link = rig.open()
    rig.raw.send(nonsense)
    await eventually(lambda: rig.ear.corrupt, "it is told")
    rig.engine.send(wire.encode(wire.Progress(0.5)))
    rig.publish()
    await turns(10)
    link.drain_what_is_left()
    assert (rig.ear.reports, rig.ear.steps, len(rig.ear.corrupt)) == ([], [], 1)
    link.close()


@pytest.mark.parametrize("what", ["credit for nothing", "a step that does not decode", "an event that does not decode"])
@looped
async def test_nonsense_in_the_ring_is_told_once_and_nothing_is_believed_after_it(rig, what):
    link = rig.open()
    if what == "credit for nothing":
        rig.data.writer.add(64)
    else:
        rig.writer.put(wire.STEP if "step" in what else wire.EVENT, b"\xc1")
        rig.writer.commit()
    await eventually(lambda: rig.ear.corrupt, "it is told")
    rig.publish()
    rig.engine.send(wire.encode(wire.Progress(0.5)))
    await turns(10)
    assert (rig.ear.reports, rig.ear.steps, len(rig.ear.corrupt)) == ([], [], 1)
    link.close()


@looped
async def test_commands_wait_for_an_engine_that_does_not_read_and_nobody_waits_for_them(rig):
    link = rig.open()
    sent = [wire.Submit(rid=rid, prompt="p" * 100_000) for rid in range(20)]
    for command in sent:
        link.send(command)
    assert rig.control.unsent
    received = []

    def read() -> bool:
        received.extend(map(wire.decode_command, rig.engine.receive()))
        return len(received) == len(sent)

    await eventually(read, "all arrive")
    assert received == sent
    await turns()
    assert not rig.control.unsent
    link.close()


@looped
async def test_after_close_nothing_is_said_and_no_descriptor_is_waited_for(rig):
    """libuv ends the whole process when a descriptor that it is to wait for has been closed."""
    link = rig.open()
    rig.raw.close()
    fd = rig.control.fd
    link.close()
    for rid in (1, 2, 3):
        link.send(wire.Cancel(rid))
    assert not asyncio.get_running_loop().remove_writer(fd)
