"""Admission under any sequence of arrivals, ends, crashes, deadlines and departures, in virtual time: no slot is lost, order
is kept, poison is ended, and whoever waits is told.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slimproc.admission.generation import Generation
from slimproc.admission.quarantine import Quarantine
from slimproc.errors import EngineCrashed, EngineError, SlimprocError
from slimproc.ipc.wire import Said
from slimproc.replicas.states import ReplicaState
from slimproc.request import ChatPrompt, Deadline
from tests.admission.conftest import Desk
from tests.fakes import FakeEngine, FakeReplica, RecordingStream, request, turns
from tests.residency.virtual import VirtualRunner

S = ReplicaState
which = st.integers(0, 1000)
SECONDS = st.sampled_from([*[None] * 12, 0.0, 0.3, 2.0, 30.0])


class Resumable(RecordingStream):
    """Goes on in another engine once it has said something, as an event stream of a model with ``on_crash: resume`` does."""

    __slots__ = ()

    @property
    def delivered(self) -> bool:
        return bool(self.parts)

    def go_on(self) -> bool:
        if self.said is not None and self.said.tokens == self.completion_tokens:
            return False
        self.said = Said(self.text, self.completion_tokens)
        self.error, self.first_at_ns, self.ends = None, 0, 0
        return True


class Admission(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = VirtualRunner()
        self.generations: list[Generation] = []
        self.refused = 0
        self.deaths = 0

    def do(self, act: Callable[[], Any], *, seconds: float = 0.0) -> None:
        """Act inside the loop, and let what follows from it happen."""

        async def main() -> None:
            act()
            await asyncio.sleep(seconds)
            await turns()

        self.runner.run(main())

    @initialize(strict=st.booleans())
    def open(self, *, strict: bool) -> None:
        replicas = FakeReplica(slots=2), FakeReplica(index=1, slots=1), FakeReplica("k", slots=2)
        self.strict = strict
        self.do(lambda: setattr(self, "desk", Desk(*replicas, max_queue=3, strict=strict)))
        self.suspects = self.desk.controller.suspects
        for replica in replicas:
            self.do(replica.become_ready)
        self.suspects._quarantine = self.quarantine = Quarantine(self.runner.clock)

    @property
    def alive(self) -> list[Generation]:
        return [generation for generation in self.generations if not generation.outcome]

    @property
    def engines(self) -> list[FakeEngine]:
        return [replica.engine for replica in self.desk.replicas if replica.engine is not None]

    def running(self) -> list[tuple[FakeEngine, int]]:
        return [(engine, rid) for engine in self.engines for rid in engine.streams]

    def owner(self, engine: FakeEngine, rid: int) -> Generation | None:
        """None: it has ended, and the engine has not heard yet."""
        stream = engine.streams[rid]
        return next((one for one in self.alive if any(stream is mine for mine in one.streams)), None)

    # --- what may happen ----------------------------------------------------------------------------------------------

    @rule(
        model=st.sampled_from("mmk"), text=st.sampled_from("ab"), n=st.sampled_from([1, 1, 1, 2, 4]), chat=st.booleans(),
        resumes=st.booleans(), seconds=SECONDS, queue=SECONDS, times=st.sampled_from([1, 1, 2, 4]),
    )  # fmt: skip
    def arrive(
        self, *, model: str, text: str, n: int, chat: bool, resumes: bool, seconds: float | None, queue: float | None,
        times: int,
    ) -> None:  # fmt: skip
        prompts = [ChatPrompt([{"role": "user", "content": text}])] if chat else [text]

        def submit() -> None:
            now = asyncio.get_running_loop().time()
            at, queue_at = (math.inf if limit is None else now + limit for limit in (seconds, queue))
            wanted = request(model, prompts=prompts, n=n, deadline=Deadline(at), queue_deadline=Deadline(queue_at))
            streams = [(Resumable if resumes else RecordingStream)(index) for index in range(n)]
            for stream in streams:
                stream.joined = n == 2
            try:
                self.generations.append(self.desk.controller.submit(wanted, streams))
            except SlimprocError:
                self.refused += 1

        for _ in range(times):
            self.do(submit)

    @rule(seconds=st.sampled_from([0.0, 0.0, 0.1, 0.3, 1.0, 6.0]))
    def pass_time(self, seconds: float) -> None:
        self.do(lambda: None, seconds=seconds)

    @precondition(lambda self: self.alive)
    @rule(place=which, really=st.sampled_from([False, False, False, True]))
    def leave(self, *, place: int, really: bool) -> None:
        if really:
            self.do(self.alive[place % len(self.alive)].close)

    @precondition(lambda self: self.running())
    @rule(place=which, what=st.sampled_from(["text", "text", "finish", "finish", "fail", "obey", "obey"]))
    def hear(self, place: int, what: str) -> None:
        engine, rid = self.running()[place % len(self.running())]
        acts: dict[str, Callable[[], None]] = {
            "text": lambda: engine.say(rid),
            "finish": lambda: engine.finish(rid),
            "fail": lambda: engine.fail(rid, EngineError("no")),
            "obey": engine.obey_cancels,
        }
        self.do(acts[what])

    @precondition(lambda self: self.running())
    @rule(what=st.sampled_from(["text", "text", "finish"]))
    def everybody_hears(self, what: str) -> None:
        for engine, rid in self.running():
            if rid in engine.streams:
                self.do(lambda engine=engine, rid=rid: engine.say(rid) if what == "text" else engine.finish(rid))

    @rule(place=st.integers(0, 2))
    def become_ready(self, place: int) -> None:
        replica = self.desk.replicas[place]
        if replica.engine is None:
            self.do(replica.become_ready)

    @precondition(lambda self: self.running())
    @rule(
        place=st.integers(0, 2), inside=st.sampled_from(["all", "all", "one", "none"]), which=which,
        again=st.sampled_from([True, True, True, False]),
    )  # fmt: skip
    def crash(self, place: int, inside: str, which: int, *, again: bool) -> None:
        """As a replica does it; ``inside``: who was in the native call that was fatal. ``again``: it is back at once."""
        replica = self.desk.replicas[place]
        engine = replica.engine
        if engine is None:
            return
        rids = list(engine.streams)
        fatal = {"all": rids, "none": [], "one": rids and [rids[which % len(rids)]]}[inside]
        self.deaths += 1

        def die() -> None:
            replica.engine, engine.dead = None, True
            for rid in rids:
                engine.fail(rid, EngineCrashed("it died", inside_of=self.deaths if rid in fatal else None))
            replica.become(S.BACKOFF, "it died")

        self.do(die)
        if again:
            self.do(replica.become_ready)

    @rule(place=st.integers(0, 2), state=st.sampled_from([S.STARTING, S.FAILED, S.BACKOFF]))
    def not_become_ready(self, place: int, state: ReplicaState) -> None:
        replica = self.desk.replicas[place]
        if replica.engine is None:
            self.do(lambda: replica.become(state, "no", load_failed=state is not S.STARTING))

    # --- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def no_slot_is_free_while_somebody_may_have_it(self) -> None:
        """Who is first may not: a suspect that waits for an engine of its own; who is behind one on trial in that engine;
        with ``strict``, who is not the oldest of all.
        """
        heads = [one for model in "mk" if (one := self.desk.controller._queues[model].head()) is not None]
        if self.strict and heads:
            heads = [min(heads, key=lambda one: one.arrived)]
        for head in heads:
            if self.quarantine.suspected_since(head.request.model, head.request) is not None:
                continue
            for replica in self.desk.replicas:
                if replica.model == head.request.model and replica.engine is not None:
                    tried = self.suspects._trials.get(replica.engine, head) is not head
                    assert tried or not replica.engine.free_slots

    @invariant()
    def every_slot_that_is_taken_is_somebodys(self) -> None:
        for engine in self.engines:
            assert engine.occupied == len(engine.streams) <= engine.model.slots, "every chat has been rendered by now"
            for rid in engine.streams:
                assert self.owner(engine, rid) is not None or rid in engine.cancels

    @invariant()
    def nobody_starts_before_who_came_earlier(self) -> None:
        for models in ["mk"] if self.strict else "mk":
            waiting = False
            for generation in self.generations:
                if generation.request.model not in models or generation.outcome:
                    continue
                waiting = waiting or not generation.started
                assert not (waiting and generation.started)

    @invariant()
    def nobody_outlives_its_deadline(self) -> None:
        now = self.runner.clock.now
        assert not [one for one in self.alive if one.request.deadline.at < now - 0.001]
        assert not [one for one in self.alive if not one.started and one.request.queue_deadline.at < now - 0.001]

    @invariant()
    def poison_is_neither_in_an_engine_nor_in_a_queue(self) -> None:
        assert not [one for one in self.alive if self.suspects.refusal(one.request.model, one.request) is not None]

    @invariant()
    def nobody_joins_who_is_on_trial(self) -> None:
        for engine, suspect in self.suspects._trials.items():
            owners = {rid: self.owner(engine, rid) for rid in engine.streams}
            mine = [rid for rid, owner in owners.items() if owner is suspect]
            assert all(owners[rid] in (None, suspect) for rid in owners if mine and rid > min(mine))

    @invariant()
    def what_was_said_is_said_to_the_next_engine(self) -> None:
        for engine, rid in self.running():
            stream = engine.streams[rid]
            if stream.said is not None and not engine.submits[rid].said == stream.said:
                raise AssertionError((engine.submits[rid].said, stream.said))
            assert stream.said is None or stream.text.startswith(stream.said.text)

    @invariant()
    def the_queue_is_bounded_and_counts_who_waits(self) -> None:
        depths, in_flight = self.desk.controller.queue_depths(), self.desk.controller.in_flight()
        for model in "mk":
            mine = [one for one in self.alive if one.request.model == model]
            waiting = sum(not one.started for one in mine)
            assert depths[model] == waiting <= 3
            assert in_flight[model] == len(mine) - waiting

    @invariant()
    def every_end_is_counted_once(self) -> None:
        ended = len(self.generations) - len(self.alive)
        counted = sum(sum(self.desk.outcomes(model).values()) for model in "mk")
        assert counted == ended + self.refused

    def teardown(self) -> None:
        """From here on everything is well: whoever waits is served, or told that its time is over."""
        if not hasattr(self, "desk"):
            self.runner.close()
            return
        for _ in range(60):
            for place in range(3):
                self.become_ready(place)
            for engine in self.engines:
                self.do(engine.obey_cancels)
                for rid in list(engine.streams):
                    self.do(lambda engine=engine, rid=rid: engine.finish(rid) if rid in engine.streams else None)
            self.pass_time(1.0)
        assert all(generation.outcome for generation in self.generations), self.alive
        for engine in self.engines:
            assert engine.free_slots == engine.model.slots
        self.every_end_is_counted_once()
        assert self.runner.run(self.desk.controller.wait_idle(0))
        self.runner.close()


Admission.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestAdmission = Admission.TestCase
