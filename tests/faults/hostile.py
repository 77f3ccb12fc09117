"""An engine that says whatever a test likes: messages of every kind, damaged, and a real incarnation that hears them."""

from __future__ import annotations

import mmap
import os
import random
import socket
from typing import Any

import msgspec

from slimproc.ipc import wire
from slimproc.ipc.control import ControlSocket
from slimproc.ipc.credit import create_credit
from slimproc.ipc.region import create_region
from slimproc.ipc.ring import RingReader, RingWriter
from slimproc.metrics import ModelMetrics
from slimproc.replicas.incarnation import Incarnation
from slimproc.replicas.limits import EngineLimits
from slimproc.replicas.states import ReplicaEvent
from slimproc.request import SamplingParams, Usage
from slimproc.settings import EngineSettings, FakeSettings
from slimproc.stream import TokenStream, VectorStream

EPOCH = 7
SLOTS = 8
MODEL = wire.ModelInfo(context=64, slots=SLOTS, vocab_size=300, control_tokens=["<a>"], details={"bytes": 5})
SETTINGS = EngineSettings(model="m", backend="fake", slots=SLOTS, fake=FakeSettings())
USAGE = Usage(3, 2, 1)
PROBABLE = [wire.Logprob(b"te", -0.5, [(b"te", -0.5), (b"ax", -2.0)], 0), wire.Logprob(b"xt", -1.5, [], 2)]

COMMANDS: list[wire.Command] = [
    wire.Load(EPOCH, SETTINGS, 30.0),
    wire.Submit(rid=1, prompt="hello", max_tokens=3),
    wire.Submit(
        rid=2, prompt="<|im_start|>user", literals=[(2, 5)], chat=True, stop=("ab", "c"), echo=True, logprobs=2,
        sampling=SamplingParams(temperature=0.5, seed=3, logit_bias={5: -100.0}),
    ),
    wire.Submit(rid=3, prompt=[104, 105], max_tokens=9, said=wire.Said("tok0", 1)),
    wire.Embed(rid=4, prompt="a text", name="input", dimensions=8),
    wire.Embed(rid=5, prompt=[104, 105], name="documents[1]", query="q"),
    wire.Cancel(1),
    wire.Tokenize(1, "text", add_special=True, parse_special=False),
    wire.Detokenize(2, [104, 105]),
    wire.Shutdown(),
]  # fmt: skip
REPORTS: list[wire.Report] = [
    wire.Progress(0.5),
    wire.Ready(EPOCH, MODEL, 0.5),
    wire.LoadRefused("no", permanent=True, scarce=True),
    wire.Tokenized(1, [1, 2, 3]),
    wire.Detokenized(1, "text"),
    wire.QuestionRefused(1, "no", "tokens"),
    wire.Aside(1, aside=True),
]
STEPS: list[wire.Step] = [
    wire.Step(12345, [wire.Tok(1, "text", 1, 0), wire.Tok(2, "é", 1, 2, USAGE), wire.Tok(3, "", 0, 1, USAGE)]),
    wire.Step(12345, [wire.Tok(1, "a")], [wire.ScoredTok(2, "text", 2, 0, None, PROBABLE)]),
]
EVENTS: list[wire.Event] = [
    wire.Failed(1, "engine_error", "it failed", None),
    wire.Failed(2, "invalid_request", "no", "prompt"),
    wire.Embedded(4, bytes(16)),
    wire.Embedded(4, bytes(16), USAGE),
]
DECODERS = [
    *((wire.decode_command, command) for command in COMMANDS),
    *((wire.decode_report, report) for report in REPORTS),
    *((wire.decode_step, step) for step in STEPS),
    *((wire.decode_event, event) for event in EVENTS),
]

_ODD: list[Any] = [
    -1, 0, 1, 2, 3, 5, 255, 1 << 31, 1 << 63, (1 << 64) - 1, -(1 << 63), 0.5, 1e308, float("nan"), float("inf"), -0.0,
    True, None, "", "engine_crashed", "\0", "é" * 300, b"", b"\xff" * 40, [], [[]], {}, {"type": "ready"},
]  # fmt: skip


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Bytes changed, or cut off."""
    out = bytearray(data)
    for _ in range(chance.randrange(1, 4)):
        out[chance.randrange(len(out))] = chance.randrange(256)
    if chance.random() < 0.2:
        del out[chance.randrange(len(out)) :]
    return bytes(out)


def distorted(data: bytes, chance: random.Random) -> bytes:
    """A message as well formed as before, in which one value is another one, of whatever type."""
    document = msgspec.msgpack.decode(data)
    places = list(_places(document))
    container, key = chance.choice(places)
    container[key] = chance.choice(_ODD)
    return msgspec.msgpack.encode(document)


def _places(node: Any) -> Any:
    keys = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in keys:
        yield node, key
        yield from _places(node[key])


class Process:
    """What an incarnation has of its process, without one."""

    pid = 1

    def __init__(self, credit: str, epoch: int = EPOCH) -> None:
        self.epoch = epoch
        self.data, self.space = create_credit(credit), create_credit(credit)
        region = create_region(1 << 16, epoch=EPOCH, replica=0, credit=credit)
        self.memory = mmap.mmap(region, 0)
        try:
            self.reader = RingReader(region, self.data.reader, self.space.writer, epoch=epoch)
            self.writer = RingWriter(region, self.data.writer, self.space.reader)
        finally:
            os.close(region)
        ours, self.raw = socket.socketpair()
        self.raw.setblocking(False)
        self.control = ControlSocket(ours)

    def watch_exit(self, *_: Any) -> None:
        pass

    def signal(self, number: int) -> None:
        raise AssertionError(f"nobody sends it {number} but its owner, who is not there")

    def close(self) -> None:
        self.reader.close()
        self.writer.close()
        self.memory.close()
        self.control.close()
        self.raw.close()
        self.data.close()
        self.space.close()


class Ended(TokenStream):
    """Counts its ends."""

    __slots__ = ("ends",)

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.ends = 0

    def _end(self) -> None:
        self.ends += 1


class EndedVector(VectorStream):
    __slots__ = ("ends",)

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.ends = 0

    def _end(self) -> None:
        self.ends += 1


class Hearing:
    """A real incarnation over ``process``, with two texts, a scored one and a vector in it. Make it in the loop, with
    ``EngineProcess`` of the incarnation's module replaced by ``spawn``.
    """

    process: Process

    @classmethod
    def spawn(cls, **_: Any) -> Process:
        return cls.process

    def __init__(self, credit: str, *, ready: bool = True) -> None:
        self.process = type(self).process = Process(credit)
        self.news: list[tuple[ReplicaEvent, str]] = []
        self.metrics = ModelMetrics()
        self.engine = Incarnation(
            "m/0", 0, SETTINGS, EngineLimits(1 << 16, credit, 30.0, 30.0, {}), self.metrics,
            post=lambda event, _, reason: self.news.append((event, reason)), on_slot_free=lambda: None,
        )  # fmt: skip
        self.streams: list[Ended | EndedVector] = []
        if ready:
            self.engine.on_report(REPORTS[1])
            self.streams += [Ended(), Ended(), Ended(), EndedVector()]
            for stream in self.streams:
                self.engine.take_slot().start(stream, lambda rid: wire.Submit(rid=rid, prompt="x"))

    @property
    def corrupt(self) -> bool:
        return any(event is ReplicaEvent.CORRUPT for event, _ in self.news)

    def say(self, kind: int, message: bytes, *, commit: bool = True) -> None:
        """A frame; 0: a report."""
        if not kind:
            self.process.raw.send(len(message).to_bytes(4, "little") + message)
            return
        if not self.process.writer.put(kind, message):
            raise AssertionError("the ring is full, so that nobody listens")
        if commit:
            self.process.writer.commit()

    def close(self) -> None:
        self.engine.bury("it was nonsense")
