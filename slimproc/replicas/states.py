"""The life of a replica as one table. Standard library only; nothing else in the package changes a replica's state.

Rules that the table cannot say:

* One task owns a replica and is the only caller of ``next_state``.
* Events carry the incarnation of the engine that they are about. The owner drops stale ones before they get here, so an
  event that has no row is a bug of ours: it raises and changes nothing.
* KILLING and STOPPING hear only EXITED and STOP_ASKED: entering them unsubscribes everything else.
* STOPPING ends in STOPPED and KILLING in BACKOFF, so that no flag has to remember why a process is being ended.
* A start that is asked while a replica is on its way down waits in the owner until STOPPED; a second stop changes nothing.
* STOPPING and KILLING have no limit: a process that not even SIGKILL ends keeps its replica there (``ReplicaOwner.stuck``).
* The ledger's hold lasts through BACKOFF.
"""

from __future__ import annotations

import enum
from types import MappingProxyType

from slimproc.errors import IllegalTransition


class ReplicaState(enum.Enum):
    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    KILLING = "killing"
    BACKOFF = "backoff"
    FAILED = "failed"


class ReplicaEvent(enum.Enum):
    START_ASKED = "start asked"
    READY_RECEIVED = "ready received"
    TIMED_OUT = "timed out"
    CORRUPT = "corrupt"
    STALLED = "stalled"
    DEVICE_LOST = "device lost"
    EXITED = "exited"
    STOP_ASKED = "stop asked"
    DRAINED = "drained"
    DRAIN_ABANDONED = "drain abandoned"
    BACKOFF_ELAPSED = "back-off elapsed"
    GAVE_UP = "gave up"


_S, _E = ReplicaState, ReplicaEvent

TRANSITIONS = MappingProxyType({
    _S.STOPPED: {_E.START_ASKED: _S.STARTING},
    _S.STARTING: {
        _E.READY_RECEIVED: _S.READY,
        _E.TIMED_OUT: _S.KILLING,
        _E.CORRUPT: _S.KILLING,
        _E.DEVICE_LOST: _S.KILLING,
        _E.EXITED: _S.BACKOFF,
        _E.STOP_ASKED: _S.STOPPING,
    },
    _S.READY: {
        _E.STOP_ASKED: _S.DRAINING,
        _E.STALLED: _S.KILLING,
        _E.CORRUPT: _S.KILLING,
        _E.DEVICE_LOST: _S.KILLING,
        _E.EXITED: _S.BACKOFF,
    },
    _S.DRAINING: {
        _E.DRAINED: _S.STOPPING,
        _E.TIMED_OUT: _S.STOPPING,
        _E.DRAIN_ABANDONED: _S.READY,
        _E.STALLED: _S.STOPPING,
        _E.CORRUPT: _S.STOPPING,
        _E.DEVICE_LOST: _S.STOPPING,
        _E.EXITED: _S.STOPPED,
    },
    _S.STOPPING: {_E.EXITED: _S.STOPPED},
    _S.KILLING: {_E.EXITED: _S.BACKOFF, _E.STOP_ASKED: _S.STOPPING},
    _S.BACKOFF: {_E.BACKOFF_ELAPSED: _S.STARTING, _E.GAVE_UP: _S.FAILED, _E.STOP_ASKED: _S.STOPPED},
    _S.FAILED: {_E.START_ASKED: _S.STARTING, _E.STOP_ASKED: _S.STOPPED},
})  # fmt: skip

RUNNING = frozenset({_S.STARTING, _S.READY, _S.DRAINING, _S.STOPPING, _S.KILLING})
"""The states in which there is a process."""


def next_state(state: ReplicaState, event: ReplicaEvent) -> ReplicaState:
    """Where ``event`` leads from ``state``. Raises IllegalTransition, and then nothing has changed."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise IllegalTransition(f"a replica that is {state.value} cannot hear '{event.value}'") from None
