"""Admission's decisions as pure functions over plain values: no awaits, no clock of their own, no effects."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slimproc.replicas.restart import RETRY_AFTER
from slimproc.replicas.states import ReplicaState


class Verdict(enum.Enum):
    START = "start"
    """A slot is free and nobody waits for it."""
    QUEUE = "queue"
    REFUSE_FULL = "refuse: the queue is full"
    REFUSE_LOADING = "refuse: loading"
    REFUSE_FAILED = "refuse: failed"


@dataclass(frozen=True)
class ReplicaView:
    """What a decision may know of a replica."""

    state: ReplicaState
    free_slots: int
    occupied: int
    load_failed: bool
    seconds_in_state: float
    known_blocks: int = 0
    """Blocks of the prompt's beginning that it has read before (``affinity.py``)."""
    known_prompts: int = 0
    """Prompts that it is remembered to hold; a new one goes where it pushes out the fewest."""
    renewed: bool = False
    """It has failed, and its file has come or changed since."""


@dataclass(frozen=True)
class QueueView:
    """Requests that wait, of this model and of all, and how many may."""

    waiting: int
    limit: int
    waiting_in_all: int
    limit_in_all: int
    ahead: int = 0
    """Requests for other models that must go first (``order: strict``)."""


def decide(queue: QueueView, replicas: Sequence[ReplicaView], *, refuse_while_loading: bool) -> Verdict:
    """What becomes of a request that has just arrived."""
    if queue.waiting == 0 and queue.ahead == 0 and choose(replicas) is not None:
        return Verdict.START
    if hopeless(replicas) and not any(may_retry(replica) for replica in replicas):
        return Verdict.REFUSE_FAILED  # as those were told who waited when the load failed
    if refuse_while_loading and not any(replica.state is ReplicaState.READY for replica in replicas):
        return Verdict.REFUSE_LOADING
    if queue.waiting >= queue.limit or queue.waiting_in_all >= queue.limit_in_all:
        return Verdict.REFUSE_FULL
    return Verdict.QUEUE


def choose(replicas: Sequence[ReplicaView]) -> int | None:
    """Which replica with a free slot gets the next sequence: the one that has read most of its prompt before, unless
    its outstanding work costs more than the reading saves; without such, the one with the least outstanding work.

    A sequence that runs beside ours is taken to cost what reading one block costs.
    """
    free = [place for place, replica in enumerate(replicas) if replica.free_slots > 0]
    return min(
        free,
        key=lambda place: (
            replicas[place].occupied - replicas[place].known_blocks,
            replicas[place].occupied,
            replicas[place].known_prompts,
            place,
        ),
        default=None,
    )


def may_retry(replica: ReplicaView) -> bool:
    """A replica that was given up is tried again when somebody asks for it, but not more often than once a minute,
    unless its file is another by now.
    """
    due = replica.renewed or replica.seconds_in_state >= RETRY_AFTER
    return due and replica.state is ReplicaState.FAILED


def hopeless(replicas: Sequence[ReplicaView]) -> bool:
    """No replica can serve, and the last news of each is that it could not be loaded: that is not worth waiting for.

    After a crash of an engine that did serve, requests go on waiting: it comes back. A replica that is stopped counts while
    another backs off from its load: they are alike, and where not all fit they may fail in turns for ever.
    """
    off = [replica for replica in replicas if replica.state is ReplicaState.BACKOFF and replica.load_failed]
    rest = [replica for replica in replicas if replica not in off]
    given_up = ReplicaState.FAILED, *([ReplicaState.STOPPED] if off else [])
    return all(replica.state in given_up for replica in rest)


def expected_wait(times_left: Iterable[float], seconds_each: float) -> float:
    """Seconds until all who wait have a slot, and the next one has it: each takes ``seconds_each`` of what is served, but
    who will have run out of time by then (``times_left``, in their order) takes none.
    """
    wait = 0.0
    for left in times_left:
        if left > wait:
            wait += seconds_each
    return wait


def retry_after(waiting: int, drained_per_second: float) -> float:
    """When a refused caller should come back: when the queue ahead will have drained; 1 to 60 s, 1 if unknown."""
    if drained_per_second <= 0:
        return 1.0
    return float(math.ceil(min(60.0, max(1.0, (waiting + 1) / drained_per_second))))
