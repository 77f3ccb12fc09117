"""AdmissionController acts on what ``policy.py`` decides: it queues requests, hands over slots, and refuses.

Everything happens in the loop's thread without an await, so a decision and its effect cannot be parted.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from slimproc import logs
from slimproc.admission import policy, record
from slimproc.admission.admitted import Admitted, Asked, next_deadline
from slimproc.admission.demand import DemandBook
from slimproc.admission.generation import Generation, Render
from slimproc.admission.pace import Pace
from slimproc.admission.passage import Forward, Passage
from slimproc.admission.policy import QueueView, ReplicaView, Verdict
from slimproc.admission.queue import RequestQueue
from slimproc.admission.routing import Router, serving, view
from slimproc.admission.suspects import Suspects
from slimproc.admission.unavailable import unavailable
from slimproc.errors import ModelNotFound, Overloaded, ServiceUnavailable, ShuttingDown, SlimprocError
from slimproc.metrics import Metrics
from slimproc.replicas.replica import Replica
from slimproc.replicas.supervisor import Supervisor
from slimproc.request import Work
from slimproc.residency.views import Demand
from slimproc.stream import TokenStream

log = logs.get("slimproc.admission")


@dataclass(frozen=True)
class ModelLimits:
    """``max_queue``: requests of the model that may wait."""

    max_queue: int
    forwards: bool | None = None
    """Whether its requests go to an upstream; None: unknown, and not checked."""


class AdmissionController:
    """One queue per model. Holds requests and no memory; residency holds memory and no requests.

    ``on_demand`` is called when ``demands()`` has changed in a way that matters to residency. It must not call back.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        metrics: Metrics,
        render: Render,
        *,
        models: Mapping[str, ModelLimits],
        max_queue_total: int,
        refuse_while_loading: bool,
        strict: bool = False,
        on_demand: Callable[[], None] = lambda: None,
    ) -> None:
        """``strict``: nobody gets a slot while somebody older waits, whatever for."""
        self.on_demand = on_demand
        self._supervisor = supervisor
        self._metrics = metrics
        self._render = render
        self._limits = models
        self._max_queue_total = max_queue_total
        self._refuse_while_loading = refuse_while_loading
        self._strict = strict
        self._queues: dict[str, RequestQueue[Admitted]] = {model: RequestQueue() for model in models}
        self._book = DemandBook(self._queues)
        self._paces = {model: Pace() for model in models}
        self._running: set[Admitted] = set()
        self.suspects = Suspects(self._running, self._look_again)
        self._router = Router(self.suspects)
        self._due: dict[str, None] = {}
        self._dispatching = False
        self._closed = False
        self._idle = asyncio.Event()
        self._left = asyncio.Event()

    # --- another configuration ----------------------------------------------------------------------------------------

    def reconfigure(
        self, models: Mapping[str, ModelLimits], *, max_queue_total: int, refuse_while_loading: bool, strict: bool
    ) -> None:
        """Other limits from now on. A model that is not in ``models`` keeps its own until it is removed."""
        self._limits = {**self._limits, **models}
        self._max_queue_total = max_queue_total
        self._refuse_while_loading = refuse_while_loading
        self._strict = strict
        for model in models:
            if model not in self._queues:
                self._queues[model] = RequestQueue()
                self._paces[model] = Pace()
            self._dispatch(model)

    async def wait_none(self, model: str) -> None:
        """Wait until nobody waits for the model or is answered by it."""
        while any(request.request.model == model for request in self._running):
            self._left.clear()
            await self._left.wait()

    def remove(self, model: str) -> None:
        """The model is no more; nobody waits for it or is answered by it."""
        self._book.forget(model)
        del self._queues[model], self._paces[model]
        self._limits = {name: limits for name, limits in self._limits.items() if name != model}

    # --- the way in ---------------------------------------------------------------------------------------------------

    def submit(self, request: Work, streams: Sequence[TokenStream]) -> Generation:
        """Admit a request or refuse it at once. Raises Overloaded, Quarantined, ServiceUnavailable or ShuttingDown.

        The caller must ``close()`` what it gets, whatever happens.
        """
        self._refuse(request)
        poison = self.suspects.refusal(request.model, request)
        if poison is not None:
            self._metrics.reject(request.model, poison)
            raise poison
        generation = Generation(request, streams, self, self._render)
        self._enqueue(generation)
        return generation

    def pass_on(self, request: Forward) -> Passage:
        """The same for a request that an upstream is to answer."""
        self._refuse(request)
        passage = Passage(request, self)
        self._enqueue(passage)
        return passage

    def _enqueue(self, request: Admitted) -> None:
        self._running.add(request)
        self._note_ready(request)
        self._queues[request.request.model].append(request)
        self._dispatch(request.request.model)

    def _refuse(self, asked: Asked) -> None:
        """Raise what keeps a request out, if anything does."""
        model = asked.model
        refusal = self._refusal(model)
        if refusal is None and (waiting := self._queues[model].all()):
            refusal = self._paces[model].refusal(asked, waiting, self._slots(model))
        if refusal is not None:
            self._metrics.reject(model, refusal)
            raise refusal

    def _refusal(self, model: str) -> SlimprocError | None:
        if self._closed:
            return ShuttingDown("the server is shutting down")
        if model not in self._queues:
            return ModelNotFound(f"the model {model} has just been removed", param="model")
        verdict = policy.decide(
            self._view_queue(model), self._view_replicas(model), refuse_while_loading=self._refuse_while_loading
        )
        if verdict is Verdict.REFUSE_FAILED:
            return self._unavailable(model)
        if verdict in (Verdict.REFUSE_FULL, Verdict.REFUSE_LOADING) and not self._is_served(model):
            self._book.ask(model, time.monotonic())
            self.on_demand()
        if verdict is Verdict.REFUSE_FULL:
            wait = self._paces[model].retry_after(len(self._queues[model]), self._slots(model))
            return Overloaded(f"the queue of {model} is full", retry_after=wait)
        return self._unavailable(model) if verdict is Verdict.REFUSE_LOADING else None

    def _unavailable(self, model: str) -> ServiceUnavailable:
        return unavailable(model, self._supervisor.of(model))

    # --- slots --------------------------------------------------------------------------------------------------------

    def _dispatch(self, model: str) -> None:
        """Hand free slots to whoever is first, until there are no slots or nobody waits.

        What that sets off may ask for it again: then it is done afterwards, not inside.
        """
        self._due[model] = None
        if self._dispatching:
            return
        self._dispatching = True
        try:
            while self._due:
                model = next(iter(self._due))
                del self._due[model]
                self._dispatch_of(model)
        finally:
            self._dispatching = False

    def _look_again(self, model: str) -> None:
        if model in self._queues:
            self._dispatch(model)

    def _dispatch_of(self, model: str) -> None:
        if not self._strict:
            while self._hand_over(model):
                pass
            self._tell(model)
            return
        while (first := self._oldest()) is not None and self._hand_over(first):
            pass
        for each in self._queues:
            self._tell(each)

    def _oldest(self) -> str | None:
        """The model of whoever has waited the longest; None: nobody waits."""
        heads = [(head.arrived, model) for model, queue in self._queues.items() if (head := queue.head()) is not None]
        return min(heads, default=(0.0, None))[1]

    def _hand_over(self, model: str) -> bool:
        """Give the head of the queue a slot, or its end if its time is over. False: there is nobody, or no slot."""
        queue = self._queues[model]
        request = queue.head()
        if request is None:
            return False
        if next_deadline(request.request, started=request.started) <= time.monotonic():
            request.expire()  # its timer is due in this very turn: no engine is to hear of it
            return True
        if self._limits[model].forwards not in (None, isinstance(request, Passage)):
            request.fail(ServiceUnavailable(f"the model {model} has just become one of another kind", retry_after=1.0))
            return True
        if isinstance(request, Generation) and (poison := self._poison(request)) is not None:
            request.fail(poison)  # a copy of it has become poison while it waited
            return True
        life = self._router.place(request, self._supervisor.of(model))
        if life is None:
            return False
        first = not request.started
        self._note_ready(request)
        request.grant(life.take_slot())
        queue.taken(request)
        if first:
            waited = request.times.granted - request.times.arrived
            self._metrics.model(model).queue_wait.observe(waited)
        return True

    def _note_ready(self, request: Admitted) -> None:
        """If its model serves: who came before it did has waited for a load."""
        lives = () if request.times.ready else serving(self._supervisor.of(request.request.model))
        if lives:
            request.times.ready = max(request.times.arrived, min(life.ready_since for life in lives))

    def began(self, request: Generation) -> None:
        """Its first text: a suspect's trial is over."""
        if self.suspects.acquit(request):
            self._dispatch(request.request.model)

    def on_replica_change(self, replica: Replica) -> None:
        """A replica changed its state, or one of its slots became free."""
        model = replica.model
        if model not in self._queues:
            return  # it was removed, and this is one of its last replicas
        if replica.serving is not None:
            self._book.forget(model)
            self._dispatch(model)
        elif policy.hopeless(self._view_replicas(model)):
            self._book.forget(model)
            for request in self._queues[model].drain():
                request.fail(self._unavailable(model))
            self._dispatch(model)

    # --- what residency asks and tells --------------------------------------------------------------------------------

    def demands(self) -> list[Demand]:
        """Every model that somebody waits for, or was just refused for not being there; see ``demand.py``."""
        return self._book.demands(time.monotonic())

    def fail_waiting(self, model: str, error: SlimprocError, before: float | None = None) -> None:
        """Tell those who wait for a model that they cannot have it; with ``before`` (monotonic), only those who had come
        by then. What has a slot goes on.
        """
        if model not in self._queues:
            return  # it was removed
        if before is None:
            self._book.forget(model)
        for request in self._queues[model].all():
            if before is None or request.arrived <= before:
                request.fail(copy.copy(error))  # each raises its own: a traceback belongs to one task
        self._dispatch(model)

    def _is_served(self, model: str) -> bool:
        return bool(serving(self._supervisor.of(model)))

    def _tell(self, model: str) -> None:
        if self._book.changed(model, served=self._is_served(model)):
            self.on_demand()

    # --- what requests tell -------------------------------------------------------------------------------------------

    def wants_slot_again(self, request: Admitted) -> None:
        if isinstance(request, Generation):
            self.suspects.acquit(request)  # its trial has ended with its engine
        if self._closed and not self._is_served(request.request.model):
            request.fail(ShuttingDown("the server is shutting down"))  # no engine is started any more
            return
        self._queues[request.request.model].put_back(request)
        self._dispatch(request.request.model)

    def leave_queue(self, request: Admitted) -> None:
        if self._queues[request.request.model].discard(request):
            self._dispatch(request.request.model)

    def note_fatal(self, request: Generation, death: int) -> None:
        """Deaths are counted by what was asked for, so that copies and a client's own tries count together. The copies
        that still run when it becomes poison are ended before they cost a third engine.
        """
        asked = request.request
        if not self.suspects.is_blamed(request) or not self.suspects.note(asked.model, asked, death):
            return
        log.error("poison: the same work has killed two engines", request_id=asked.id, model=asked.model)
        for other in list(self._running):
            if other is not request and isinstance(other, Generation) and (poison := self._poison(other)) is not None:
                other.fail(poison)

    def is_poison(self, request: Generation) -> bool:
        return self._poison(request) is not None

    def _poison(self, request: Generation) -> SlimprocError | None:
        return self.suspects.refusal(request.request.model, request.request)

    def may_go_elsewhere(self, request: Admitted) -> bool:
        """Another replica of its model serves than the one that it was given."""
        replicas = self._supervisor.of(request.request.model)
        return any(replica.serving is not None and replica.name != request.engine_name for replica in replicas)

    def ended(self, request: Admitted) -> None:
        """A request has ended: let others have what it had, and keep its record, once."""
        self._running.discard(request)
        if isinstance(request, Generation):
            self.began(request)
            if request.outcome == "ok":
                self.suspects.pardon(request)
        self._left.set()
        if not self._running:
            self._idle.set()
        model = request.request.model
        self._note_ready(request)
        self._paces[model].ended(request, self._slots(model))
        if request.outcome == "ok":
            for replica in self._supervisor.of(model):
                if replica.name == request.engine_name:
                    replica.served()
        record.keep(request, self._metrics)

    # --- looking in -----------------------------------------------------------------------------------------------------

    def _view_queue(self, model: str) -> QueueView:
        waiting = {name: len(queue) for name, queue in self._queues.items()}
        own, in_all = waiting[model], sum(waiting.values())
        return QueueView(
            waiting=own,
            limit=self._limits[model].max_queue,
            waiting_in_all=in_all,
            limit_in_all=self._max_queue_total,
            ahead=in_all - own if self._strict else 0,
        )

    def _view_replicas(self, model: str) -> list[ReplicaView]:
        return [view(replica) for replica in self._supervisor.of(model)]

    def _slots(self, model: str) -> int:
        """Of the replicas that serve now."""
        return sum(life.slots for life in serving(self._supervisor.of(model)))

    def queue_depths(self) -> dict[str, int]:
        return {model: len(queue) for model, queue in self._queues.items()}

    def in_flight(self) -> dict[str, int]:
        """Admitted requests that have a slot, by model."""
        counts = dict.fromkeys(self._queues, 0)
        for request in self._running:
            counts[request.request.model] += request.started
        return counts

    # --- the way out ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Take nothing more; who waits without a slot is told. What runs goes on until it ends or ``abort``."""
        self._closed = True
        for queue in self._queues.values():
            for request in queue.waiting():
                request.fail(ShuttingDown("the server is shutting down"))

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
        for request in list(self._running):
            request.fail(ShuttingDown("the server is shutting down"))
