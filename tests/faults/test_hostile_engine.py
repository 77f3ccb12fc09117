"""Whatever an engine says, and whatever is made of a message on its way: the front believes it or kills, and counts on."""

from __future__ import annotations

import asyncio
import faulthandler
import json
import random
from collections.abc import Iterator

import msgspec
import pytest

from slimproc.engines.fake.backend import FakeBackend
from slimproc.engines.loop import EngineLoop
from slimproc.errors import RingCorrupt
from slimproc.ipc import wire
from slimproc.ipc.control import ControlSocket
from slimproc.ipc.credit import default_credit
from slimproc.ipc.publisher import StepPublisher
from slimproc.replicas import incarnation
from tests.fakes import looped, turns
from tests.faults.hostile import (
    COMMANDS,
    DECODERS,
    EPOCH,
    EVENTS,
    MODEL,
    REPORTS,
    SETTINGS,
    STEPS,
    Hearing,
    Process,
    damaged,
    distorted,
)

pytestmark = pytest.mark.slow

FRAMES = [(wire.STEP, wire.encode(step)) for step in STEPS] + [(wire.EVENT, wire.encode(event)) for event in EVENTS]
SPOKEN = FRAMES + [(0, wire.encode(report)) for report in REPORTS]


@pytest.fixture(autouse=True)
def no_watchdog() -> Iterator[None]:
    """An engine's loop arms it for its own process, which here is the tests'."""
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def no_process(monkeypatch):
    monkeypatch.setattr(incarnation, "EngineProcess", Hearing.spawn)


def test_every_kind_of_message_is_among_those_that_are_damaged():
    kinds = {type(message) for _, message in DECODERS}
    assert kinds == {*wire.Command.__args__, *wire.Report.__args__, *wire.Event.__args__, wire.Step}


def test_a_million_damaged_messages_of_every_kind_raise_only_what_their_readers_expect():
    """Bytes changed and cut off; what still decodes is a message of its type."""
    chance = random.Random(8)
    encoded = [(decode, wire.encode(message)) for decode, message in DECODERS]
    refused = 0
    for _ in range(1_000_000):
        decode, message = chance.choice(encoded)
        try:
            decode(damaged(message, chance))
        except msgspec.MsgspecError:  # for which an engine is killed
            refused += 1
    assert refused > 300_000


def assert_sound(hearing: Hearing) -> None:
    """What the rest of the server builds upon, whatever was said."""
    engine = hearing.engine
    assert 0 <= engine.occupied <= engine.slots + wire.MOST_ASIDE
    assert max(0, engine.slots - engine.occupied) <= engine.free_slots <= engine.slots
    assert all(stream.ends <= 1 for stream in hearing.streams)
    assert all(stream.ends == stream.ended for stream in hearing.streams)
    assert 0 <= engine.progress <= 1
    assert 0 <= engine.tokens == hearing.metrics.generated_tokens
    json.dumps([engine.progress, engine.load_seconds], allow_nan=False)


@pytest.mark.parametrize("harm", [damaged, distorted])
@looped
async def test_whatever_a_ready_engine_says_is_believed_or_kills_it_and_every_stream_ends_once(harm):
    """Through the ring and the control socket, in frames with the right checksum; a round goes on until it is corrupt."""
    chance = random.Random(f"{harm.__name__} 8")
    corrupt = 0
    for _ in range(4000):
        hearing = Hearing(default_credit())
        for _ in range(8):
            kind, message = chance.choice(SPOKEN)
            hearing.say(kind, harm(message, chance))
            await turns(3)
            assert_sound(hearing)
            if hearing.corrupt:
                corrupt += 1
                break
        asked = asyncio.ensure_future(hearing.engine.ask(lambda number: wire.Tokenize(number, "x", True, True)))
        await turns(2)
        known = [stream.completion_tokens for stream in hearing.streams]
        if hearing.corrupt:  # then nothing more is believed, be it as good as it may
            hearing.process.raw.send(wire.encode(wire.Progress(0.25)))
            hearing.say(wire.STEP, wire.encode(wire.Step(1, [wire.Tok(rid, "x") for rid in range(1, 5)])))
            await turns(3)
            assert [stream.completion_tokens for stream in hearing.streams] == known
            assert sum(event.name == "CORRUPT" for event, _ in hearing.news) == 1
        hearing.close()
        assert [stream.ends for stream in hearing.streams] == [1, 1, 1, 1]
        assert hearing.engine.occupied == 0
        assert isinstance((await asyncio.gather(asked, return_exceptions=True))[0], Exception)
    assert corrupt > 1000


@pytest.mark.parametrize("harm", [damaged, distorted])
@looped
async def test_whatever_a_loading_engine_says_it_becomes_ready_as_itself_or_not_at_all(harm):
    chance = random.Random(f"{harm.__name__} 9")
    ready = 0
    for _ in range(4000):
        hearing = Hearing(default_credit(), ready=False)
        hearing.say(0, harm(wire.encode(REPORTS[1]), chance))
        await turns(3)
        assert_sound(hearing)
        if hearing.engine.ready is not None:
            ready += 1
            assert hearing.engine.ready.epoch == EPOCH
            assert hearing.engine.slots > 0
            assert hearing.engine.load_seconds >= 0
        hearing.close()
    assert ready > 100


@looped
async def test_lengths_and_pieces_on_the_control_socket_are_no_more_trusted_than_messages():
    """The stream's own bytes are changed, cut and given in pieces, with several messages in it."""
    chance = random.Random(10)
    stream = b"".join(
        len(message).to_bytes(4, "little") + message for message in map(wire.encode, [*REPORTS[:1], *REPORTS[3:]])
    )
    corrupt = 0
    for _ in range(4000):
        hearing = Hearing(default_credit())
        data = damaged(stream, chance)
        while data and not hearing.corrupt:
            size = chance.randrange(1, 60)
            hearing.process.raw.send(data[:size])
            data = data[size:]
            await turns(2)
            assert_sound(hearing)
        corrupt += hearing.corrupt
        hearing.close()
    assert corrupt > 400


# --- frames that are torn, old, or of somebody else -------------------------------------------------------------------


@pytest.mark.parametrize("way", ["half of it", "no byte of it but its header", "its last bytes"])
@looped
async def test_a_frame_that_was_published_before_all_of_it_was_written_is_not_believed(way):
    for number in range(200):
        hearing = Hearing(default_credit())
        for _ in range(number % 7):
            hearing.say(wire.STEP, FRAMES[0][1])
        await turns(3)
        start = hearing.process.memory.find(b"torn write")
        assert start < 0
        payload = wire.encode(wire.Step(1, [wire.Tok(1, "torn write" * 30)]))
        hearing.say(wire.STEP, payload, commit=False)
        start = hearing.process.memory.find(payload)
        begin = {"half of it": len(payload) // 2, "its last bytes": len(payload) - 3}.get(way, 0)
        hearing.process.memory[start + begin : start + len(payload)] = bytes(len(payload) - begin)
        before = hearing.streams[0].completion_tokens
        hearing.process.writer.commit()
        await turns(3)
        assert hearing.corrupt
        assert hearing.streams[0].completion_tokens == before
        hearing.close()


@looped
async def test_a_frame_of_an_earlier_lap_is_not_taken_for_a_new_one():
    """Whole and with its checksum right: what it lacks is the number that is due."""
    hearing = Hearing(default_credit())
    hearing.say(wire.STEP, FRAMES[0][1])
    await turns(3)
    size = 16 + (len(FRAMES[0][1]) + 15 & ~15)
    old = hearing.process.memory[4096 : 4096 + size]
    hearing.say(wire.STEP, FRAMES[0][1], commit=False)
    hearing.process.memory[4096 + size : 4096 + 2 * size] = old
    hearing.process.writer.commit()
    await turns(3)
    assert hearing.corrupt
    assert hearing.streams[0].completion_tokens == 1
    hearing.close()


def test_a_ring_of_another_incarnation_is_not_read():
    with pytest.raises(RingCorrupt, match="belongs to incarnation 7, not to 8"):
        Process(default_credit(), epoch=EPOCH + 1)


@looped
async def test_a_ready_of_another_incarnation_makes_nobody_ready():
    hearing = Hearing(default_credit(), ready=False)
    hearing.say(0, wire.encode(wire.Ready(EPOCH + 1, MODEL, 0.5)))
    await turns(3)
    assert (hearing.corrupt, hearing.engine.is_ready, hearing.engine.slots) == (True, False, 0)
    hearing.close()


@looped
async def test_a_second_ready_is_no_news_that_an_engine_may_bring():
    hearing = Hearing(default_credit())
    hearing.say(0, wire.encode(wire.Ready(EPOCH, MODEL, 0.5)))
    await turns(3)
    assert hearing.corrupt
    hearing.close()


@looped
async def test_slots_that_an_engine_lends_can_be_taken_until_it_wants_them_back():
    hearing = Hearing(default_credit())
    free, engine = hearing.engine.free_slots, hearing.engine

    async def say(rid: int, *, aside: bool) -> int:
        hearing.say(0, wire.encode(wire.Aside(rid, aside=aside)))
        await turns(3)
        assert_sound(hearing)
        return engine.free_slots

    assert await say(1, aside=True) == free + 1
    assert await say(1, aside=True) == free + 1, "once is all"
    assert await say(999, aside=True) == free + 1, "a sequence that is not there has none to lend"
    taken = [engine.take_slot() for _ in range(free + 1)]
    assert engine.free_slots == 0
    assert await say(1, aside=False) == 0
    taken.pop().cancel()
    assert engine.free_slots == 0, "that one is the first sequence's"
    taken.pop().cancel()
    assert engine.free_slots == 1
    assert await say(2, aside=True) == 2
    hearing.say(wire.EVENT, wire.encode(wire.Failed(2, "engine_error", "it failed")))
    await turns(3)
    assert engine.free_slots == 2, "it is given back once"
    hearing.close()


@looped
async def test_a_sequence_that_is_set_aside_again_and_again_sets_something_off_once():
    """Whoever is told looks at queues and replicas."""
    hearing = Hearing(default_credit())
    told = []
    hearing.engine._on_slot_free = lambda: told.append(hearing.engine.free_slots)
    free = hearing.engine.free_slots
    for aside in [True] * 10 + [False, True] * 10:
        hearing.say(0, wire.encode(wire.Aside(1, aside=aside)))
        await turns(3)
        assert_sound(hearing)
    assert told == [free + 1]
    assert hearing.engine.free_slots == free, "it has wanted its own back"
    hearing.close()


@looped
async def test_an_engine_lends_no_more_slots_than_a_number(monkeypatch):
    """However many sequences it sets aside: they have left the queue that has a limit."""
    monkeypatch.setattr(wire, "MOST_ASIDE", 2)
    hearing = Hearing(default_credit())
    free = hearing.engine.free_slots
    for rid in (1, 2, 3, 4):
        hearing.say(0, wire.encode(wire.Aside(rid, aside=True)))
    await turns(3)
    assert hearing.engine.free_slots == free + 2
    hearing.close()


# --- the other direction ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", [damaged, distorted])
def test_whatever_command_reaches_an_engine_costs_at_most_its_own_sequence(harm):
    """The front writes them; what is in them came from callers. Only the numbers of sequences are the front's own."""
    chance = random.Random(f"{harm.__name__} 11")
    process = Process(default_credit())
    backend = FakeBackend(SETTINGS)
    loop = EngineLoop(
        backend, wire.Ready(EPOCH, backend.load(lambda _: None), 0.0), control=ControlSocket(process.raw),
        ring=process.writer, publisher=StepPublisher(process.writer, wait_for_room=False), step_limit=60.0,
    )  # fmt: skip
    encoded = [wire.encode(command) for command in COMMANDS if not isinstance(command, wire.Load | wire.Shutdown)]
    ends: dict[int, int] = {}
    questions = 0

    def hear(kind: int, payload: bytes, _: bool) -> None:  # noqa: FBT001  # as the ring calls it
        if kind == wire.EVENT:
            event = wire.decode_event(payload)
            if isinstance(event, wire.Failed) or event.usage is not None:
                ends[event.rid] += 1
            return
        step = wire.decode_step(payload)
        for item in [*step.items, *(step.scored or ())]:
            ends[item.rid] += bool(item.finish)

    for rid in range(10, 40_010):
        try:
            command = wire.decode_command(harm(chance.choice(encoded), chance))
        except msgspec.MsgspecError:
            continue
        if isinstance(command, wire.Load | wire.Shutdown):
            continue
        if isinstance(command, wire.Submit | wire.Embed):
            command = msgspec.structs.replace(command, rid=rid)
            ends[rid] = 0
        if isinstance(command, wire.Tokenize | wire.Detokenize):
            command = msgspec.structs.replace(command, question=rid)
        loop._handle(command)
        for _ in range(3):
            loop._step()
        loop._handle(wire.Cancel(rid))
        while process.reader.drain(hear):
            pass
        if isinstance(command, wire.Tokenize | wire.Detokenize):
            (report,) = process.control.receive()
            assert wire.decode_report(report).question == command.question
            questions += 1
        assert ends.get(rid, 1) == 1, command
    assert len(ends) > 2000
    assert questions > 50
    process.close()
