"""How a model stands, in the words of the two worlds that ask: model routers' and InferSwap's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from slimproc.http.errors import public_text
from slimproc.replicas.replica import Replica
from slimproc.replicas.states import ReplicaState

_S = ReplicaState

_LOADING: Final = frozenset({_S.STARTING, _S.KILLING, _S.BACKOFF})
_BEST_FIRST: Final = (
    (_S.READY, "ready"),
    (_S.DRAINING, "unloading"),
    (_S.STARTING, "loading"),
    (_S.KILLING, "loading"),
    (_S.BACKOFF, "loading"),
    (_S.STOPPING, "unloading"),
    (_S.FAILED, "failed"),
    (_S.STOPPED, "unloaded"),
)
"""A model of several replicas is as well off as the best of them."""
_RESIDENT: Final = frozenset({"ready", "unloading"})


def router_word(replicas: Sequence[Replica]) -> str:
    """In the words that model routers share: loaded, loading, failed or unloaded."""
    states = {replica.state for replica in replicas}
    if _S.READY in states or _S.DRAINING in states:
        return "loaded"
    if states & _LOADING:
        return "loading"
    return "failed" if _S.FAILED in states else "unloaded"


def describe_status(replicas: Sequence[Replica], held: int) -> dict[str, Any]:
    """The ``status`` object of ``GET /v1/models``. ``held``: bytes that are kept for the model.

    What nobody knows of a server that is not ours is null: an attempt to ask it that failed says nothing of its memory.
    """
    replica = min(replicas, key=lambda one: next(place for place, row in enumerate(_BEST_FIRST) if row[0] is one.state))
    state = dict(_BEST_FIRST)[replica.state]
    sighting = replica.sighting
    ready: bool | None = state == "ready"
    residency: str | None = "resident" if state in _RESIDENT else "not_resident"
    if sighting is not None and state != "ready":
        if sighting.state == "unknown":
            state, ready, residency = "unknown", None, None
        elif sighting.residency is not None:
            residency = None if sighting.residency == "unknown" else sighting.residency
    reason = replica.unload_failed or replica.reason or (sighting.reason if sighting else "")
    return {
        "value": router_word(replicas),
        "state": state,
        "ready": ready,
        "residency": residency,
        "reason": public_text(reason),
        "reserved_bytes": held,
        "last_error": _last_error(replica),
        "remote_state": sighting.state if sighting is not None and sighting.asked else None,
    }


def _last_error(replica: Replica) -> dict[str, str] | None:
    """What its server says itself; of an engine of ours, what ended it or kept it from loading, while that counts."""
    if replica.sighting is not None and replica.sighting.last_error is not None:
        code, message = replica.sighting.last_error
        return {"code": public_text(code), "message": public_text(message)}
    if not replica.reason:
        return None
    code = "load_failed" if replica.load_failed else "engine_crashed"
    return {"code": code, "message": public_text(replica.reason)}
