"""The ring between two processes: killed writers, stalled readers, restarts, and what an idle pair costs."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import defaultdict
from pathlib import Path

import pytest

from slimproc.ipc import wire
from slimproc.ipc.publisher import StepPublisher
from slimproc.ipc.wire import Step, Tok
from tests.ipc.conftest import CREDITS, Ring, in_child

LIMIT = 60.0
"""Seconds that anything here may take; waiting ends when its condition holds."""

linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")

EVENTFD_FIRST = pytest.mark.parametrize(
    "credit", [CREDITS[0], pytest.param("pipe", marks=pytest.mark.slow)], indirect=True
)
"""For what takes seconds with each kind of credit."""


def wait_until(condition, what):
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, f"in vain: {what}"
        time.sleep(0.0005)


def wait_for_credit(ring, seconds=LIMIT):
    """False when nothing came in that time."""
    poll = select.poll()
    poll.register(ring.reader.fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


@contextlib.contextmanager
def writer_process(work):
    """Runs ``work`` beside the block; afterwards it is gone in any case."""
    pid = in_child(work)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_another_process_publishes_flat_out_and_every_step_arrives_once_in_order(make_ring):
    ring = make_ring()
    steps = 100_000

    def write():
        publisher = StepPublisher(ring.writer, wait_for_room=True)
        for i in range(steps):
            publisher.publish(Step(i, [Tok(i % 7, f"{i:x}" * (i % 13))]))
        wait_until(publisher.flush, "room for the last of it")

    def check(_kind, payload, _alone):
        nonlocal seen
        assert wire.decode_step(payload) == Step(seen, [Tok(seen % 7, f"{seen:x}" * (seen % 13))])
        seen += 1

    seen = 0
    with writer_process(write):
        while seen < steps:
            assert wait_for_credit(ring), f"nothing more after {seen} steps"
            while ring.reader.drain(check):
                pass
    assert seen == steps


@EVENTFD_FIRST
def test_three_hundred_kills_leave_no_bad_frame_and_lose_no_credited_one(make_ring):
    """A writer killed anywhere, in the middle of a frame too, has published exactly what it gave credit for."""
    choose = random.Random(300)
    total = unpublished = 0
    for round_number in itertools.count():
        if round_number >= 150 and (unpublished or round_number == 1500):  # times two credits
            break
        ring: Ring = make_ring()

        def write(ring=ring, seed=round_number):
            rng, i = random.Random(seed), 0
            while True:
                step = Step(i, [Tok(rid, "x" * rng.randrange(200)) for rid in range(8)])
                if ring.writer.put(wire.STEP, wire.encode(step)):
                    i += 1
                if rng.random() < 0.5:
                    ring.writer.commit()
                    ring.writer.mark_step(i, 0)

        seen = 0

        def check(_kind, payload, _alone):
            nonlocal seen
            step = wire.decode_step(payload)
            assert step.at_ns == seen
            assert [item.rid for item in step.items] == list(range(8))
            seen += 1

        with writer_process(write) as pid:
            assert wait_for_credit(ring)
            end = time.monotonic() + choose.uniform(0, 0.004)
            while time.monotonic() < end:
                ring.reader.drain(check)
            os.kill(pid, signal.SIGKILL)
        while ring.reader.drain(check):
            pass
        assert seen >= ring.reader.progress().steps, "the writer had given credit for more"
        header = ring.reader._memory[ring.reader._at : ring.reader._at + 16]
        # A whole frame that had no credit yet is in memory now and then, and was rightly not read.
        unpublished += int.from_bytes(header[8:12], "little") == ring.reader._sequence
        assert ring.reader.pending == 0
        assert ring.data.reader.take() == 0
        total += seen
        ring.reader.close()
        ring.writer.close()
    assert total > 150
    assert unpublished > 0, "no kill hit a frame without credit: this test has tested nothing"


@pytest.mark.parametrize("sequences", [1, 32])
def test_a_reader_that_stalls_for_a_second_delays_text_and_loses_none(make_ring, sequences):
    ring = make_ring()

    def write():
        publisher = StepPublisher(ring.writer)
        steps = 0
        while True:
            text = f" {steps}" * 8
            finish = int(steps == 3999)
            publisher.publish(Step(steps, [Tok(rid, text, 1, finish) for rid in range(sequences)]))
            steps += 1
            ring.writer.mark_step(steps, time.monotonic_ns())
            if finish:
                break
            time.sleep(0.0003)
        while not publisher.flush():
            select.select([ring.writer.space_fd], [], [])
        ring.writer.mark_step(steps, time.monotonic_ns())
        signal.pause()

    texts: dict[int, list[str]] = defaultdict(list)
    tokens: dict[int, int] = defaultdict(int)
    finished: set[int] = set()

    def take(_kind, payload, _alone):
        for item in wire.decode_step(payload).items:
            assert item.rid not in finished, "text after the end"
            texts[item.rid].append(item.text)
            tokens[item.rid] += item.tokens
            if item.finish:
                finished.add(item.rid)

    with writer_process(write):
        assert wait_for_credit(ring)
        began = time.monotonic_ns()
        wait_until(lambda: ring.reader.progress().last_step_ns > began + 1_000_000_000, "a second of steps")
        stalled = ring.reader.progress()
        while len(finished) < sequences:
            assert wait_for_credit(ring)
            while ring.reader.drain(take):
                pass
    assert stalled.steps > 100, "the engine went on while the reader did not"
    assert stalled.full_hits > 0
    assert stalled.merged_tokens > 0
    for rid in range(sequences):
        assert "".join(texts[rid]) == "".join(f" {i}" * 8 for i in range(4000))
        assert tokens[rid] == 4000


@linux
@EVENTFD_FIRST
def test_a_hundred_restarts_leave_no_descriptor_no_mapping_and_no_memory(credit):
    def left_over():
        maps = Path("/proc/self/maps").read_text().count("slimproc-ring")
        return len(list(Path("/proc/self/fd").iterdir())), maps

    def shared_memory():
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Shmem:"))

    before, memory_before = left_over(), shared_memory()
    for round_number in range(100):
        ring = Ring(credit, 1 << 20)

        def write(ring=ring):
            i = 0
            publisher = StepPublisher(ring.writer)
            while True:
                publisher.publish(Step(i, [Tok(rid, " some text") for rid in range(32)]))
                i += 1

        with writer_process(write) as pid:
            assert wait_for_credit(ring)
            if round_number % 10 == 0:  # also with a ring that is full
                poll = select.poll()
                poll.register(pid_fd := os.pidfd_open(pid), select.POLLIN)
                assert not poll.poll(50), "the writer has ended by itself"
                os.close(pid_fd)
            ring.reader.drain(lambda *_: None)
        ring.close()
    assert left_over() == before
    grown = shared_memory() - memory_before
    assert grown < 50 * 1024, f"{grown} KiB of shared memory more than before; 100 leaked rings would be 102,400"


IDLE = textwrap.dedent(
    """
    import os, select, sys
    import uvloop
    from slimproc.ipc import wire
    from slimproc.ipc.credit import create_credit
    from slimproc.ipc.publisher import StepPublisher
    from slimproc.ipc.region import create_region
    from slimproc.ipc.ring import RingReader, RingWriter

    credit = sys.argv[1]
    fd = create_region(1 << 20, epoch=1, replica=0, credit=credit)
    data, space = create_credit(credit), create_credit(credit)
    commands, tell = os.pipe()
    engine = os.fork()
    if engine == 0:
        os.close(tell)
        publisher = StepPublisher(RingWriter(fd, data.writer, space.reader))
        poll = select.poll()
        poll.register(commands, select.POLLIN)
        while poll.poll() and os.read(commands, 1):
            publisher.publish(wire.Step(1, [wire.Tok(1, "hello")]))
        os._exit(0)
    os.close(commands)
    reader = RingReader(fd, data.reader, space.writer, epoch=1)
    loop = uvloop.new_event_loop()

    def on_frame(kind, payload, alone):
        print(wire.decode_step(payload).items[0].text, engine, flush=True)

    def on_credit():
        if reader.drain(on_frame):
            loop.call_soon(on_credit)

    loop.add_reader(reader.fd, on_credit)
    loop.add_reader(0, lambda: os.write(tell, os.read(0, 1)) or loop.stop())
    loop.run_forever()
    """
)


def switches(pid: int) -> tuple[str, str]:
    """How the process stands, and how often it has gone to sleep: a sleeper that calls the kernel must wake first."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line for line in lines if line.startswith("State:")), next(
        line for line in lines if line.startswith("voluntary")
    )


def calls_seen(pids: list[int], log: Path, seconds: float) -> list[str] | None:
    """Lines of strace over that time, or None where it is missing or may not attach."""
    strace = shutil.which("strace")
    if strace is None:
        return None
    attach = [word for pid in pids for word in ("-p", str(pid))]
    with subprocess.Popen([strace, "-f", "-o", str(log), *attach], stderr=subprocess.PIPE, text=True) as process:
        said = [process.stderr.readline() for _ in pids]
        if not all("attached" in line for line in said):
            process.kill()
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT)
    return log.read_text().splitlines()


@linux
def test_an_idle_pair_makes_no_system_call_for_two_seconds(credit, tmp_path):
    """By strace where it can attach, else by the count of voluntary context switches."""
    command = [sys.executable, "-c", IDLE, credit]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ) as front:
        try:
            front.stdin.write(b"1")
            front.stdin.flush()
            word, engine = front.stdout.readline().split()
            assert word == b"hello"
            pids = [front.pid, int(engine)]
            wait_until(lambda: all("S (sleeping)" in switches(pid)[0] for pid in pids), "both asleep")
            before = [switches(pid) for pid in pids]
            calls = calls_seen(pids, tmp_path / "calls", 2.0)
            if calls is None:
                with pytest.raises(subprocess.TimeoutExpired):
                    front.wait(2.0)
                assert [switches(pid) for pid in pids] == before
            else:
                waits = ("epoll_wait(", "epoll_pwait(", "poll(", "restart_syscall(")
                made = [line.split(maxsplit=1)[1] for line in calls]
                assert all((call.startswith(waits) and "unfinished" in call) or "detached" in call for call in made), (
                    made
                )
                assert len(made) <= 2 * len(pids)
            front.stdin.write(b"2")
            front.stdin.flush()
            assert front.stdout.readline().startswith(b"hello"), "it was not idle but dead"
        finally:
            front.kill()
