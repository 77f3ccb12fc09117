"""slimproc's front with a token source inside it: one step a turn of the loop, one token a stream and step.

    python benchmarks/dataplane.py [--streams 64] [--tokens 5000] [--every 0]

The server is the product's own and whole (routes, admission, replicas, the decoding of a step, its hand-out to the
streams, the events, the writes), but for the engine's process and the link to it. The steps are encoded beforehand, and
a stepper stands where the ring's callback stands. It answers when ``--streams`` requests are there, says in its log
where it listens, and serves until it is told to stop.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from events import text
from stepper import Stepper

from slimproc.config import load_config
from slimproc.ipc import wire
from slimproc.replicas import incarnation
from slimproc.replicas.process import ExitStatus
from slimproc.request import Finish, Usage
from slimproc.server import run

STEP_NS = 1_000_000
"""Between two steps on the clock that the frames carry."""


def frames(streams: int, tokens: int) -> list[bytes]:
    """A round's steps: one token for each of the sequences 1 to ``streams``."""
    return [frame(streams, position) for position in range(tokens)]


def frame(streams: int, position: int, finish: Finish = Finish.RUNNING) -> bytes:
    usage = Usage(1, position + 1) if finish else None
    items = [wire.Tok(rid, text(position), 1, int(finish), usage) for rid in range(1, streams + 1)]
    return wire.encode(wire.Step((position + 1) * STEP_NS, items))


class NoProcess:
    """Stands for ``EngineProcess``."""

    pid = os.getpid()
    epoch = 1
    last_line = ""

    def __init__(self, **_: Any) -> None:
        self.steps = 0
        self.reader = SimpleNamespace(progress=lambda: SimpleNamespace(steps=self.steps, full_hits=0))

    def watch_exit(self, on_exit: Callable[[ExitStatus], None], _oom_kills: object = None) -> None:
        self.exit = lambda: on_exit(ExitStatus(0, ""))

    def signal(self, _number: int) -> None:
        self.exit()

    def close(self) -> None:
        """There is nothing to give back."""


class Source:
    """Stands for ``EngineLink``: hears the commands, and hands out the steps."""

    frames: list[bytes]
    streams: int
    every: float

    def __init__(self, process: NoProcess, listener: incarnation.Incarnation) -> None:
        self._process = process
        self._listener = listener
        self._last = b""
        self._tokens = 0
        self._stepper = Stepper(self.streams, step=self._step, unread=self._unread, every=self.every)

    def send(self, command: wire.Command) -> None:
        match command:
            case wire.Load():
                model = wire.ModelInfo(context=1 << 20, slots=self.streams, vocab_size=1)
                self._listener.on_report(wire.Ready(command.epoch, model, 0.0))
            case wire.Submit():
                assert command.rid <= self.streams, "a round is whole before the next one begins"
                self._tokens = command.max_tokens or 1
                self._last = frame(self.streams, self._tokens - 1, Finish.LENGTH)
                self._stepper.join(self._tokens)
            case wire.Shutdown():
                self._process.exit()
            case _:
                raise AssertionError(f"the load client does nothing that leads to {command}")

    def _step(self, number: int) -> None:
        self._process.steps += 1
        last = number == self._tokens - 1
        if last:
            self._listener._numbers = itertools.count(1)  # the frames are made for these
        step = wire.decode_step(self._last if last else self.frames[number])
        self._listener.on_step(step, None)

    def _unread(self) -> int:
        transports = [stream._client._transport for stream in self._listener._streams.values()]
        return max(transport.get_write_buffer_size() if transport else 0 for transport in transports)

    def drain_what_is_left(self) -> None:
        """Nothing is under way between two steps."""

    def close(self) -> None:
        """There is nothing to give back."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=5000, help="the longest answer")
    parser.add_argument("--every", type=float, default=0.0, help="seconds between two steps; 0: flat out")
    options = parser.parse_args()
    Source.frames = frames(options.streams, options.tokens)
    Source.streams, Source.every = options.streams, options.every
    incarnation.EngineProcess, incarnation.EngineLink = NoProcess, Source
    with tempfile.TemporaryDirectory() as directory:
        flags = {"backend": "fake", "slots": str(options.streams), "port": "0", "admin_socket": f"{directory}/admin"}
        return run(load_config(None, flags=flags, environ={"HOME": directory}, dotenv=None))


if __name__ == "__main__":
    sys.exit(main())
