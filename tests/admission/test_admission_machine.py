"""Admission under any sequence of arrivals, ends, crashes and departures: no slot is lost, and order is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slimproc.admission.generation import Generation
from slimproc.errors import EngineError, Overloaded, ServiceUnavailable
from slimproc.replicas.states import ReplicaState
from slimproc.request import ChatPrompt
from tests.admission.conftest import Desk
from tests.fakes import FakeEngine, FakeReplica, turns

S = ReplicaState
which = st.integers(0, 1000)


class Admission(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.generations: list[Generation] = []
        self.refused = 0
        self.do(self.open)

    def do(self, act: Callable[[], Any]) -> None:
        """Act inside the loop, and let what follows from it happen."""

        async def main() -> None:
            act()
            await turns()

        self.runner.run(main())

    def open(self) -> None:
        self.desk = Desk(FakeReplica(slots=2), FakeReplica(index=1, slots=1), max_queue=3)

    @property
    def alive(self) -> list[Generation]:
        return [generation for generation in self.generations if not generation.outcome]

    @property
    def engines(self) -> list[FakeEngine]:
        return [replica.engine for replica in self.desk.replicas if replica.engine is not None]

    def running(self) -> list[tuple[FakeEngine, int]]:
        return [(engine, rid) for engine in self.engines for rid in engine.streams]

    # --- what may happen ----------------------------------------------------------------------------------------------

    @rule(n=st.integers(1, 4), chat=st.booleans())
    def arrive(self, *, n: int, chat: bool) -> None:
        prompts = [ChatPrompt([])] if chat else None

        def submit() -> None:
            try:
                self.generations.append(self.desk.submit(prompts=prompts, n=n))
            except (Overloaded, ServiceUnavailable):
                self.refused += 1

        self.do(submit)

    @precondition(lambda self: self.alive)
    @rule(place=which, expired=st.booleans())
    def leave(self, *, place: int, expired: bool) -> None:
        generation = self.alive[place % len(self.alive)]
        self.do(generation.expire if expired else generation.close)

    @precondition(lambda self: self.running())
    @rule(place=which, what=st.sampled_from(["text", "finish", "fail", "obey"]))
    def hear(self, place: int, what: str) -> None:
        engine, rid = self.running()[place % len(self.running())]
        acts: dict[str, Callable[[], None]] = {
            "text": lambda: engine.say(rid),
            "finish": lambda: engine.finish(rid),
            "fail": lambda: engine.fail(rid, EngineError("no")),
            "obey": engine.obey_cancels,
        }
        self.do(acts[what])

    @rule(place=st.integers(0, 1))
    def become_ready(self, place: int) -> None:
        replica = self.desk.replicas[place]
        if replica.engine is None:
            self.do(replica.become_ready)

    @rule(place=st.integers(0, 1))
    def crash(self, place: int) -> None:
        replica = self.desk.replicas[place]
        if replica.engine is not None:
            self.do(replica.crash)

    @rule(place=st.integers(0, 1), state=st.sampled_from([S.STARTING, S.FAILED, S.BACKOFF]))
    def not_become_ready(self, place: int, state: ReplicaState) -> None:
        replica = self.desk.replicas[place]
        if replica.engine is None:
            self.do(lambda: replica.become(state, "no", load_failed=state is not S.STARTING))

    # --- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def no_slot_is_free_while_somebody_waits(self) -> None:
        if any(generation.unstarted for generation in self.alive):
            assert not any(engine.free_slots for engine in self.engines)

    @invariant()
    def every_slot_that_is_taken_is_somebodys(self) -> None:
        streams = {id(stream) for generation in self.alive for stream in generation.streams if not stream.ended}
        for engine in self.engines:
            assert engine.occupied == len(engine.streams) <= engine.model.slots, "every chat has been rendered by now"
            for rid, stream in engine.streams.items():
                assert id(stream) in streams or rid in engine.cancels

    @invariant()
    def nobody_starts_before_who_came_earlier(self) -> None:
        waiting = False
        for generation in self.generations:
            waiting = waiting or not (generation.started or generation.outcome)
            assert not (waiting and generation.started)

    @invariant()
    def the_queue_is_bounded_and_counts_who_waits(self) -> None:
        waiting = sum(not generation.started for generation in self.alive)
        assert self.desk.controller.queue_depths() == {"m": waiting}
        assert waiting <= 3
        assert self.desk.controller.in_flight() == {"m": len(self.alive) - waiting}

    @invariant()
    def every_end_is_counted_once(self) -> None:
        ended = len(self.generations) - len(self.alive)
        assert sum(self.desk.outcomes().values()) == ended + self.refused

    def teardown(self) -> None:
        for generation in self.generations:
            self.do(generation.close)
        for engine in self.engines:
            self.do(engine.obey_cancels)
            assert engine.free_slots == engine.model.slots
        assert all(generation.outcome for generation in self.generations)
        assert self.runner.run(self.desk.controller.wait_idle(0))
        self.runner.close()


Admission.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAdmission = Admission.TestCase
