"""AdmissionController: the effects of ``policy.py``: it queues, hands slots over, refuses, and writes the record.

Everything happens in the loop's thread without an await, so a decision and its effect cannot be parted.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from slimproc import logs
from slimproc.admission import affinity, policy
from slimproc.admission.affinity import PrefixMemory
from slimproc.admission.generation import REFUSALS, Generation, Render
from slimproc.admission.policy import QueueView, ReplicaView, Verdict
from slimproc.admission.queue import RequestQueue
from slimproc.errors import Overloaded, ServiceUnavailable, ShuttingDown, SlimprocError
from slimproc.metrics import Metrics, ModelMetrics
from slimproc.replicas.incarnation import Incarnation
from slimproc.replicas.replica import Replica
from slimproc.replicas.states import ReplicaState
from slimproc.replicas.supervisor import Supervisor
from slimproc.request import GENERATE, Work
from slimproc.stream import TokenStream

log = logs.get("slimproc.generation")

_RATE_MEMORY = 30.0
"""Seconds over which the drain rate is averaged."""


@dataclass(frozen=True)
class ModelLimits:
    max_queue: int


class DrainRate:
    """How many requests end per second: each counts, and is forgotten exponentially. Instants are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._began = self._last = now
        self._count = 0.0

    def note(self, now: float) -> None:
        """A request has ended."""
        self._count = self._remembered(now) + 1.0
        self._last = now

    def per_second(self, now: float) -> float:
        remembered_seconds = _RATE_MEMORY * (1.0 - math.exp(-(now - self._began) / _RATE_MEMORY))
        return self._remembered(now) / max(1.0, remembered_seconds)

    def _remembered(self, now: float) -> float:
        return self._count * math.exp(-(now - self._last) / _RATE_MEMORY)


class AdmissionController:
    """One queue a model. Holds requests and no memory; residency will hold memory and no requests."""

    def __init__(
        self,
        supervisor: Supervisor,
        metrics: Metrics,
        render: Render,
        *,
        models: Mapping[str, ModelLimits],
        max_queue_total: int,
        refuse_while_loading: bool,
    ) -> None:
        self._supervisor = supervisor
        self._metrics = metrics
        self._render = render
        self._limits = models
        self._max_queue_total = max_queue_total
        self._refuse_while_loading = refuse_while_loading
        self._queues: dict[str, RequestQueue[Generation]] = {model: RequestQueue() for model in models}
        self._rates = {model: DrainRate(time.monotonic()) for model in models}
        self._running: set[Generation] = set()
        self._prefixes: WeakKeyDictionary[Incarnation, PrefixMemory] = WeakKeyDictionary()
        self._closed = False
        self._idle = asyncio.Event()

    # --- the way in ---------------------------------------------------------------------------------------------------

    def submit(self, request: Work, streams: Sequence[TokenStream]) -> Generation:
        """Admit a request or refuse it at once. Raises Overloaded, ServiceUnavailable or ShuttingDown.

        The caller must ``close()`` what it gets, whatever happens.
        """
        model = request.model
        self._retry_failed(model)
        refusal = self._refusal(model)
        if refusal is not None:
            self._metrics.reject(model, refusal)
            raise refusal
        generation = Generation(request, streams, self, self._render)
        self._running.add(generation)
        self._queues[model].append(generation)
        self._dispatch(model)
        return generation

    def _refusal(self, model: str) -> SlimprocError | None:
        if self._closed:
            return ShuttingDown("the server is shutting down")
        verdict = policy.decide(
            self._view_queue(model), self._view_replicas(model), refuse_while_loading=self._refuse_while_loading
        )
        if verdict is Verdict.REFUSE_FULL:
            wait = policy.retry_after(len(self._queues[model]), self._rates[model].per_second(time.monotonic()))
            return Overloaded(f"the queue of {model} is full", retry_after=wait)
        if verdict in (Verdict.REFUSE_FAILED, Verdict.REFUSE_LOADING):
            return self._unavailable(model)
        return None

    def _unavailable(self, model: str) -> ServiceUnavailable:
        replicas = self._supervisor.of(model)
        reason = next((replica.reason for replica in replicas if replica.reason), "")
        views = self._view_replicas(model)
        failed = all(view.state is ReplicaState.FAILED for view in views)
        what = "has failed" if failed else "could not be loaded" if policy.hopeless(views) else "is loading"
        return ServiceUnavailable(
            f"the model {model} {what}" + (f": {reason}" if reason else ""),
            retry_after=policy.RETRY_FAILED_AFTER if failed else 5.0,
        )

    def _retry_failed(self, model: str) -> None:
        """Also for a request that is then refused: somebody has asked for the model."""
        if self._closed:
            return
        for replica, view in zip(self._supervisor.of(model), self._view_replicas(model), strict=True):
            if policy.may_retry(view):
                replica.ask_start()

    # --- slots --------------------------------------------------------------------------------------------------------

    def _dispatch(self, model: str) -> None:
        """Hand free slots to whoever is first, until one of the two runs out."""
        queue = self._queues[model]
        replicas = self._supervisor.of(model)
        while (generation := queue.head()) is not None:
            if generation.request.deadline.remaining(time.monotonic()) <= 0:
                generation.expire()  # its timer is due in this very turn: no engine is to hear of it
                continue
            # With one replica there is nothing to choose by, and only generating keeps what was read.
            remembers = len(replicas) > 1 and generation.request.capability == GENERATE
            prefix = affinity.chain(generation.next_prompt) if remembers else ()
            place = policy.choose([self._view_for(prefix, replica) for replica in replicas])
            if place is None:
                return
            engine = replicas[place].serving
            assert engine is not None, "only a serving replica has free slots"
            if prefix:
                self._prefixes.setdefault(engine, PrefixMemory(engine.model.slots)).note(prefix)
            first = not generation.started
            slot = engine.take_slot()
            generation.grant(slot)
            queue.taken(generation)
            if first:
                waited = generation.times.granted - generation.times.arrived
                self._metrics.model(model).queue_wait.observe(waited)

    def _view_for(self, prefix: affinity.Chain, replica: Replica) -> ReplicaView:
        memory = self._prefixes.get(replica.serving) if replica.serving is not None and prefix else None
        view = _view(replica)
        return replace(view, known_blocks=memory.longest(prefix), known_prompts=len(memory)) if memory else view

    def on_replica_change(self, replica: Replica) -> None:
        """A replica changed its state, or one of its slots became free."""
        if replica.serving is not None:
            self._dispatch(replica.model)
        elif policy.hopeless(self._view_replicas(replica.model)):
            for generation in self._queues[replica.model].drain():
                generation.fail(self._unavailable(replica.model))

    # --- what generations tell ------------------------------------------------------------------------------------------

    def wants_slot_again(self, generation: Generation) -> None:
        self._queues[generation.request.model].put_back(generation)
        self._dispatch(generation.request.model)

    def leave_queue(self, generation: Generation) -> None:
        self._queues[generation.request.model].discard(generation)

    def ended(self, generation: Generation) -> None:
        """The record of one request: the metrics and the generation line, once."""
        self._running.discard(generation)
        if not self._running:
            self._idle.set()
        model = generation.request.model
        self._rates[model].note(generation.times.ended)
        if generation.outcome == "ok":
            for replica in self._supervisor.of(model):
                if replica.name == generation.engine_name:
                    replica.served()
        if generation.outcome in REFUSALS:
            assert generation.error is not None
            self._metrics.reject(model, generation.error)
        else:
            _count(generation, self._metrics.model(model))
        _log(generation)

    # --- looking in -----------------------------------------------------------------------------------------------------

    def _view_queue(self, model: str) -> QueueView:
        return QueueView(
            waiting=len(self._queues[model]),
            limit=self._limits[model].max_queue,
            waiting_in_all=sum(map(len, self._queues.values())),
            limit_in_all=self._max_queue_total,
        )

    def _view_replicas(self, model: str) -> list[ReplicaView]:
        return [_view(replica) for replica in self._supervisor.of(model)]

    def queue_depths(self) -> dict[str, int]:
        return {model: len(queue) for model, queue in self._queues.items()}

    def in_flight(self) -> dict[str, int]:
        """Admitted requests that have a slot, by model."""
        counts = dict.fromkeys(self._queues, 0)
        for generation in self._running:
            counts[generation.request.model] += generation.started
        return counts

    # --- the way out ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Take nothing more; who waits without a slot is told. What runs goes on until it ends or ``abort``."""
        self._closed = True
        for queue in self._queues.values():
            for generation in queue.waiting():
                generation.fail(ShuttingDown("the server is shutting down"))

    async def wait_idle(self, limit: float) -> bool:
        """Wait until nothing runs any more, at most ``limit`` seconds. True: nothing does."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                while self._running:
                    self._idle.clear()
                    await self._idle.wait()
        return not self._running

    def abort(self) -> None:
        """End what still runs: its time to finish is over."""
        for generation in list(self._running):
            generation.fail(ShuttingDown("the server is shutting down"))


def _view(replica: Replica) -> ReplicaView:
    engine = replica.serving
    return ReplicaView(
        state=replica.state,
        free_slots=engine.free_slots if engine else 0,
        occupied=engine.occupied if engine else 0,
        load_failed=replica.load_failed,
        seconds_in_state=time.monotonic() - replica.changed_at,
    )


def _count(generation: Generation, metrics: ModelMetrics) -> None:
    times = generation.times
    metrics.requests[generation.outcome] += 1
    for stream in generation.streams:
        metrics.prompt_tokens += stream.usage.prompt_tokens
        metrics.cached_prompt_tokens += stream.usage.cached_tokens
    if times.first_text:
        metrics.ttft.observe(times.first_text - times.arrived)
    if generation.outcome == "ok":
        metrics.request_duration.observe(times.ended - times.arrived)
        for stream in generation.streams:
            if stream.completion_tokens > 1 and stream.last_at_ns > stream.first_at_ns:
                seconds = (stream.last_at_ns - stream.first_at_ns) / 1e9
                metrics.decode_rate.observe((stream.completion_tokens - 1) / seconds)


def _log(generation: Generation) -> None:
    times, streams = generation.times, generation.streams
    log.info(
        "generation finished",
        request_id=generation.request.id,
        model=generation.request.model,
        replica=generation.engine_name,
        task=generation.request.capability,
        outcome=generation.outcome,
        finish_reason=_finish_reasons(generation),
        prompt_tokens=sum(stream.usage.prompt_tokens for stream in streams),
        completion_tokens=sum(stream.completion_tokens for stream in streams),
        cached_tokens=sum(stream.usage.cached_tokens for stream in streams),
        queue_wait_ms=_ms((times.granted or times.ended) - times.arrived),
        ttft_ms=_ms(times.first_text - times.arrived) if times.first_text else None,
        duration_ms=_ms(times.ended - times.arrived),
        reason=_reason(generation.error),
    )


def _finish_reasons(generation: Generation) -> str | None:
    """One a choice; None for what generates nothing, and so cannot end in more than one way."""
    if generation.request.capability != GENERATE:
        return None
    return ",".join(stream.finish.reason for stream in generation.streams if stream.ended and not stream.error)


def _reason(error: SlimprocError | None) -> str | None:
    """What is told to a caller who was wrong may quote the prompt, which belongs in no log: the code has to do."""
    if error is None:
        return None
    return error.message if error.status >= 500 else error.code


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
