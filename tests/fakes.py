"""Clocks, streams, engines and replicas for tests of the rooms around them: no process, no socket, time moves by hand."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from slimproc.errors import EngineCrashed, SlimprocError
from slimproc.ipc.wire import ModelInfo, Submit, Tok
from slimproc.replicas.slot import Slot
from slimproc.replicas.states import ReplicaState
from slimproc.request import Deadline, Finish, GenerateRequest, Usage
from slimproc.stream import TokenStream

LIMIT = 30.0
"""Seconds that any one condition may take on a machine that is busy with something else."""


def looped(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on uvloop, as the server runs; an exception in any callback of the loop fails it too."""

    @functools.wraps(test)
    def run(*args, **kwargs) -> None:
        complaints: list[dict[str, Any]] = []

        async def main() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
            await test(*args, **kwargs)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
        assert not complaints, complaints

    return run


async def eventually(condition: Callable[[], Any], what: str, limit: float = LIMIT) -> Any:
    """The first true value of ``condition``; an assertion that names ``what`` when there is none in time."""
    deadline = time.monotonic() + limit
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {limit:g} s: {what}"
        await asyncio.sleep(0.002)


async def turns(count: int = 5) -> None:
    """Let everything that is due in the loop happen."""
    for _ in range(count):
        await asyncio.sleep(0)


class ManualClock:
    """Monotonic seconds that pass only when a test says so."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


class RecordingStream(TokenStream):
    """A stream that insists on one end, and on silence after an error. Unless it is ``joined``, its client gets each text at
    once.
    """

    __slots__ = ("ends", "joined")

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.ends = 0
        self.joined = False

    def _end(self) -> None:
        self.ends += 1
        assert self.ends == 1, "a second terminal event"
        super()._end()

    @property
    def delivered(self) -> bool:
        return self.first_at_ns > 0 and not self.joined

    def reset(self) -> None:
        super().reset()
        self.ends = 0


class FakeEngine:
    """Slots without a process. What it was told is kept; what it says, the test says."""

    def __init__(self, replica: FakeReplica, slots: int) -> None:
        self.name = replica.name
        self.slots = slots
        self.model = ModelInfo(context=4096, slots=slots, vocab_size=1000)
        self.dead = False
        self.ready_since = time.monotonic()
        self.submits: dict[int, Submit] = {}
        self.cancels: list[int] = []
        self.streams: dict[int, TokenStream] = {}
        self._replica = replica
        self._reserved = 0
        self._numbers = itertools.count(1)

    # --- what a real incarnation offers ---------------------------------------------------------------------------

    @property
    def occupied(self) -> int:
        return len(self.streams) + self._reserved

    @property
    def free_slots(self) -> int:
        return 0 if self.dead else self.model.slots - self.occupied

    def take_slot(self) -> Slot:
        assert self.free_slots > 0
        self._reserved += 1
        return Slot(self)

    def give_back(self) -> None:
        self._reserved -= 1
        assert self._reserved >= 0
        self._replica.on_change(self._replica)

    def start(self, stream: TokenStream, submit: Callable[[int], Submit]) -> int:
        self._reserved -= 1
        assert self._reserved >= 0
        rid = next(self._numbers)
        self.streams[rid] = stream
        if self.dead:
            asyncio.get_running_loop().call_soon(self.fail, rid, EngineCrashed("it died before"))
        else:
            self.submits[rid] = submit(rid)
        return rid

    def cancel(self, rid: int) -> None:
        if rid in self.streams and rid not in self.cancels:
            self.cancels.append(rid)

    # --- what the test makes it do --------------------------------------------------------------------------------

    def say(self, rid: int, text: str = "x", finish: Finish = Finish.RUNNING) -> None:
        usage = Usage(3, 1, 0) if finish else None
        self.streams[rid].take(Tok(rid, text, 1, int(finish), usage), time.monotonic_ns(), None)
        if finish:
            del self.streams[rid]
            self._replica.on_change(self._replica)

    def finish(self, rid: int) -> None:
        self.say(rid, "end", Finish.STOP)

    def obey_cancels(self) -> None:
        for rid in self.cancels:
            if rid in self.streams:
                self.say(rid, "", Finish.CANCELLED)

    def fail(self, rid: int, error: SlimprocError) -> None:
        stream = self.streams.pop(rid, None)
        if stream is not None:
            stream.fail(error)
            self._replica.on_change(self._replica)


class FakeReplica:
    """A replica whose state the test sets."""

    def __init__(self, model: str = "m", index: int = 0, *, slots: int = 1) -> None:
        self.model = model
        self.index = index
        self.name = f"{model}/{index}"
        self.state = ReplicaState.STARTING
        self.reason = ""
        self.load_failed = self.renewed = False
        self.changed_at = time.monotonic()
        self.slots = slots
        self.engine: FakeEngine | None = None
        self.engines: list[FakeEngine] = []
        self.starts_asked = 0
        self.well_served = 0
        self.on_change: Callable[[FakeReplica], None] = lambda replica: None

    @property
    def serving(self) -> FakeEngine | None:
        return self.engine if self.state is ReplicaState.READY else None

    @property
    def serving_engine(self) -> FakeEngine | None:
        return self.serving

    def served(self) -> None:
        self.well_served += 1

    def ask_start(self) -> None:
        self.starts_asked += 1

    def become(self, state: ReplicaState, reason: str = "", *, load_failed: bool = False) -> None:
        self.state, self.reason, self.load_failed = state, reason, load_failed
        self.changed_at = time.monotonic()
        self.on_change(self)

    def become_ready(self) -> FakeEngine:
        self.engine = FakeEngine(self, self.slots)
        self.engines.append(self.engine)
        self.become(ReplicaState.READY)
        return self.engine

    def crash(self) -> None:
        """As a replica does it: no engine first, then the ends of what was in it, then BACKOFF."""
        engine, self.engine = self.engine, None
        assert engine is not None
        engine.dead = True
        for rid in list(engine.streams):
            engine.fail(rid, EngineCrashed("it died"))
        self.become(ReplicaState.BACKOFF, "it died")


class FakeSupervisor:
    def __init__(self, replicas: list[FakeReplica]) -> None:
        self.replicas = replicas

    def of(self, model: str) -> list[FakeReplica]:
        return [replica for replica in self.replicas if replica.model == model]


_ids = itertools.count(1)


def request(model: str = "m", *, seconds: float | None = None, prompts: Any = None, **fields: Any) -> GenerateRequest:
    """A request for one short text; ``seconds`` until its deadline (None: it has none)."""
    if seconds is not None:
        fields["deadline"] = Deadline.after(seconds, time.monotonic())
    return GenerateRequest(id=f"r{next(_ids)}", model=model, prompts=prompts or ["hello"], **fields)


def streams_for(wanted: GenerateRequest) -> list[TokenStream]:
    return [RecordingStream(index) for index in range(wanted.sequences)]
