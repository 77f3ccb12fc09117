"""The hot paths that are guarded, each beside its floor; everything is built beforehand, so that only the path is measured."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from slimproc.admission.policy import QueueView, ReplicaView, decide
from slimproc.http.openai.format import CompletionFormat
from slimproc.http.sse import EventClient, EventStream
from slimproc.ipc import wire
from slimproc.ipc.credit import create_credit, default_credit
from slimproc.ipc.region import create_region
from slimproc.ipc.ring import RingReader, RingWriter
from slimproc.metrics import SHORT_SECONDS, GapHistogram, Metrics
from slimproc.replicas.incarnation import Incarnation
from slimproc.replicas.states import ReplicaState
from slimproc.request import GenerateRequest
from tests.speed.guard import HotPath

# Limits are one and a half times what each was when it was written (Python 3.11, x86-64): 1.78, 1.0, 2.5, 4.4, 2.9. Who
# makes a path faster, or its floor, brings its limit down as well.
RING, WIRE, ADMISSION, EVENTS, FRONT = 2.7, 1.5, 3.7, 6.6, 4.3
STREAMS = 32
STEPS = 16
WORDS = (" the", " quick", " brown", " fox", " jumps", " é", " over", "\n")
_json = msgspec.json.Encoder().encode


def step(at_ns: int) -> wire.Step:
    return wire.Step(at_ns, [wire.Tok(rid, WORDS[(at_ns + rid) % 8]) for rid in range(1, STREAMS + 1)])


class NullTransport:
    """Takes bytes and drops them."""

    def write(self, data: bytes) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0


@contextmanager
def hot_paths() -> Iterator[dict[str, HotPath]]:
    """By name. What they hold open is closed at the end."""
    with ring() as of_ring:
        every = (of_ring, wire_format(), admission(), events(), front())
        yield {path.name: path for path in every}


@contextmanager
def ring() -> Iterator[HotPath]:
    """A frame through shared memory and back, against a socket pair that carries the same bytes."""
    credit = default_credit()
    fd = create_region(1 << 20, epoch=1, replica=0, credit=credit)
    data, space = create_credit(credit), create_credit(credit)
    writer = RingWriter(fd, data.writer, space.reader)
    reader = RingReader(fd, data.reader, space.writer, epoch=1)
    near, far = socket.socketpair()
    buffer = bytearray(1 << 16)
    payload = wire.encode(step(1))

    def on_frame(_kind: int, _payload: bytes, _alone: bool) -> None:  # noqa: FBT001 - the ring's interface
        pass

    def ours() -> None:
        for _ in range(200):
            assert writer.put(wire.STEP, payload)
            writer.commit()
            reader.drain(on_frame)

    def floor() -> None:
        for _ in range(200):
            near.send(payload)
            bytes(memoryview(buffer)[: far.recv_into(buffer)])

    try:
        yield HotPath("ring", ours, floor, RING)
    finally:
        writer.close()
        reader.close()
        data.close()
        space.close()
        near.close()
        far.close()
        os.close(fd)


def wire_format() -> HotPath:
    """A step of 32 tokens encoded and decoded, against the same values without our types."""
    made = step(1)
    plain = [made.at_ns, [[item.rid, item.text, 1, 0, None] for item in made.items]]
    encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder().decode

    def ours() -> None:
        for _ in range(100):
            wire.decode_step(wire.encode(made))

    def floor() -> None:
        for _ in range(100):
            decode(encode(plain))

    return HotPath("wire", ours, floor, WIRE)


def admission() -> HotPath:
    """What becomes of a request with four replicas, against finding the least busy of four numbers."""
    occupied = [3, 1, 2, 4]
    replicas = [
        ReplicaView(
            state=ReplicaState.READY, free_slots=8 - busy, occupied=busy, load_failed=False, seconds_in_state=9.0
        )
        for busy in occupied
    ]
    queue = QueueView(waiting=0, limit=64, waiting_in_all=0, limit_in_all=256)

    def ours() -> None:
        for _ in range(300):
            decide(queue, replicas, refuse_while_loading=False)

    def floor() -> None:
        for _ in range(300):
            min(range(4), key=lambda place: occupied[place])

    return HotPath("admission decision", ours, floor, ADMISSION)


def _streams(transport: NullTransport) -> dict[int, EventStream]:
    answer = CompletionFormat(GenerateRequest(id="speed", model="m", prompts=["x"]))
    head, tail = answer.head_and_tail(0)
    gaps = GapHistogram(SHORT_SECONDS)
    made = {}
    for rid in range(1, STREAMS + 1):
        client = EventClient()
        client.attach(transport, chunked=True, prelude=b"")
        made[rid] = EventStream(0, client, head=head, tail=tail, finish_events={}, gaps=gaps)
        made[rid].take(wire.Tok(rid, "first"), 1, None)
    return made


def events() -> HotPath:
    """Tokens into events, against the JSON of their texts and a write of it."""
    transport = NullTransport()
    made = _streams(transport)
    steps = [step(number) for number in range(1, STEPS + 1)]

    def ours() -> None:
        for one in steps:
            at_ns = one.at_ns
            for item in one.items:
                made[item.rid].take(item, at_ns, None)

    return HotPath("SSE encoding", ours, _bare_writes(transport, steps), EVENTS)


def _bare_writes(transport: NullTransport, steps: list[wire.Step]) -> Callable[[], None]:
    def floor() -> None:
        for one in steps:
            for item in one.items:
                transport.write(b"data: %b\n\n" % _json(item.text))

    return floor


def front() -> HotPath:
    """All that the front does for a token: its frame decoded, handed out, encoded, counted and written; against the
    decoding alone and a bare write for each.
    """
    transport = NullTransport()
    incarnation = Incarnation.__new__(Incarnation)  # without the process behind it
    incarnation._streams = dict(_streams(transport))
    incarnation._metrics = Metrics(["m"]).model("m")
    incarnation.tokens = 0
    payloads = [wire.encode(step(number)) for number in range(1, STEPS + 1)]

    def ours() -> None:
        for payload in payloads:
            incarnation.on_step(wire.decode_step(payload), None)

    def floor() -> None:
        for payload in payloads:
            for item in wire.decode_step(payload).items:
                transport.write(b"data: %b\n\n" % _json(item.text))

    return HotPath("front", ours, floor, FRONT)
