"""S1: frames per second through the ring against a unix socketpair that carries the same msgpack frames.

Both readers are callbacks of a uvloop loop that decode every frame; both writers are another process that encodes
every step. The ring's side is what the server runs: StepPublisher, credit, CRC, at most 16 frames a wake-up.

    python benchmarks/ring.py [--json FILE] [--credit eventfd|pipe] [--repeats 5] [--seconds 1.0]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import statistics
import struct
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import uvloop

from slimproc.ipc import wire
from slimproc.ipc.credit import create_credit, default_credit
from slimproc.ipc.publisher import StepPublisher
from slimproc.ipc.region import create_region
from slimproc.ipc.ring import RingReader, RingWriter

CAPACITY = 1 << 20
TARGET = 0.95
WORDS = [" the", " quick", " brown", " fox", " jumps", "é", " over", "\n"]
LENGTH = struct.Struct("<I")


def steps(tokens: int) -> list[wire.Step]:
    """Prebuilt, so that making objects does not hide what is measured."""
    return [
        wire.Step(time.monotonic_ns(), [wire.Tok(rid, WORDS[(i + rid) % 8]) for rid in range(tokens)])
        for i in range(64)
    ]


def write(publish: Callable[[wire.Step], None], go: int, frames: int, tokens: int) -> None:
    made = steps(tokens)
    os.read(go, 1)
    for i in range(frames):
        step = made[i & 63]
        step.at_ns = time.monotonic_ns()
        publish(step)


def in_child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException:  # noqa: BLE001  # a forked child must never return into its parent's code
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


class Rate(NamedTuple):
    """``cpu`` is microseconds a frame, of both processes: it hardly depends on what else the machine does."""

    frames_per_second: float
    cpu: float


def measure(loop: asyncio.AbstractEventLoop, pid: int, go: int, done: asyncio.Future[float], frames: int) -> Rate:
    """From the word to go until the last frame is decoded."""
    began, cpu = time.perf_counter(), time.process_time()
    os.write(go, b"g")
    ended = loop.run_until_complete(asyncio.wait_for(done, 120))
    cpu = time.process_time() - cpu
    _, status, usage = os.wait4(pid, 0)
    assert status == 0, f"the writer ended with status {status}"
    return Rate(frames / (ended - began), (cpu + usage.ru_utime + usage.ru_stime) / frames * 1e6)


def ring(frames: int, tokens: int, credit: str) -> Rate:
    fd = create_region(CAPACITY, epoch=1, replica=0, credit=credit)
    data, space = create_credit(credit), create_credit(credit)
    waiting, go = os.pipe()

    def work() -> None:
        publisher = StepPublisher(RingWriter(fd, data.writer, space.reader), wait_for_room=True)
        write(publisher.publish, waiting, frames, tokens)

    pid = in_child(work)
    reader = RingReader(fd, data.reader, space.writer, epoch=1)
    loop = uvloop.new_event_loop()
    done: asyncio.Future[float] = loop.create_future()
    got, again = 0, False

    def on_frame(_kind: int, payload: bytes, _alone: bool) -> None:  # noqa: FBT001  # the ring's interface
        nonlocal got
        got += len(wire.decode_step(payload).items)

    def drain() -> None:
        nonlocal again
        again = reader.drain(on_frame)
        if again:
            loop.call_soon(drain)
        elif got == frames * tokens:
            done.set_result(time.perf_counter())

    def on_credit() -> None:
        if not again:
            drain()

    loop.add_reader(data.reader_fd, on_credit)
    try:
        return measure(loop, pid, go, done, frames)
    finally:
        loop.remove_reader(data.reader_fd)
        loop.close()
        reader.close()
        data.close()
        space.close()
        for number in (fd, waiting, go):
            os.close(number)


def socketpair(frames: int, tokens: int) -> Rate:
    ours, theirs = socket.socketpair()
    waiting, go = os.pipe()

    def work() -> None:
        def publish(step: wire.Step) -> None:
            payload = wire.encode(step)
            theirs.sendall(LENGTH.pack(len(payload)) + payload)

        write(publish, waiting, frames, tokens)

    pid = in_child(work)
    ours.setblocking(False)
    loop = uvloop.new_event_loop()
    done: asyncio.Future[float] = loop.create_future()
    buffer = memoryview(bytearray(1 << 18))
    have = got = 0

    def on_readable() -> None:
        nonlocal have, got
        have += ours.recv_into(buffer[have:])
        at = 0
        while have - at >= 4:
            (length,) = LENGTH.unpack_from(buffer, at)
            if have - at - 4 < length:
                break
            got += len(wire.decode_step(buffer[at + 4 : at + 4 + length]).items)
            at += 4 + length
        rest = have - at
        if at and rest:
            buffer[:rest] = bytes(buffer[at:have])
        have = rest
        if got == frames * tokens:
            done.set_result(time.perf_counter())

    loop.add_reader(ours.fileno(), on_readable)
    try:
        return measure(loop, pid, go, done, frames)
    finally:
        loop.remove_reader(ours.fileno())
        loop.close()
        ours.close()
        theirs.close()
        os.close(waiting)
        os.close(go)


def compare(tokens: int, repeats: int, seconds: float, credit: str) -> dict[str, object]:
    """Interleaved, so that what else the machine does meets both alike; a short round first sets the frame count."""
    frames = max(1000, int(socketpair(5000, tokens).frames_per_second * seconds))
    sides: dict[str, Callable[[], Rate]] = {
        "ring": lambda: ring(frames, tokens, credit),
        "socketpair": lambda: socketpair(frames, tokens),
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats):
        order = list(sides) if repeat % 2 == 0 else list(reversed(sides))
        for name in order:
            rate = sides[name]()
            rates[name].append(rate.frames_per_second)
            cpu[name].append(rate.cpu)
    ratios = [a / b for a, b in zip(rates["ring"], rates["socketpair"], strict=True)]
    return {
        "tokens_per_frame": tokens,
        "frames": frames,
        "frames_per_second": {name: [round(rate) for rate in found] for name, found in rates.items()},
        "least_cpu_us_per_frame": {name: round(min(found), 2) for name, found in cpu.items()},
        "ratio_of_medians": round(statistics.median(rates["ring"]) / statistics.median(rates["socketpair"]), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def show(result: dict[str, object]) -> None:
    rates, cpu = result["frames_per_second"], result["least_cpu_us_per_frame"]
    assert isinstance(rates, dict)
    assert isinstance(cpu, dict)
    for name, found in rates.items():
        median, low, high = statistics.median(found), min(found), max(found)
        print(
            f"{result['tokens_per_frame']:>7} {name:<12} {median:>12,.0f} {low:>12,.0f} - {high:>10,.0f} {cpu[name]:>9.2f}"
        )
    ratio = result["ratio_of_medians"]
    print(f"        ring / socketpair {ratio} (target {TARGET}); pairs {result['ratios']}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--credit", choices=["eventfd", "pipe"], default=default_credit())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="about how long each measurement takes")
    options = parser.parse_args()
    print(f"ring of {CAPACITY} bytes, {options.credit} credit, {os.cpu_count()} cores, {options.repeats} repeats")
    print(f"{'tok/fr':>7} {'transport':<12} {'frames/s':>12} {'range':>25} {'CPU us/fr':>9}")
    results = []
    for tokens in (1, 32):
        results.append(compare(tokens, options.repeats, options.seconds, options.credit))
        show(results[-1])
    if options.json:
        report = {
            "what": "S1",
            "target": TARGET,
            "credit": options.credit,
            "machine": {"cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()},
            "results": results,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
