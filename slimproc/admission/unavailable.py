"""What a caller is told of a model that no replica serves and that may not be waited for."""

from __future__ import annotations

from collections.abc import Sequence

from slimproc.admission import policy
from slimproc.admission.routing import view
from slimproc.errors import ModelFailed, ServiceUnavailable
from slimproc.replicas.replica import Replica
from slimproc.replicas.restart import RETRY_AFTER
from slimproc.replicas.states import ReplicaState


def unavailable(model: str, replicas: Sequence[Replica]) -> ServiceUnavailable:
    """The error, with the first replica's reason, and when to come back."""
    reason = next((replica.reason for replica in replicas if replica.reason), "")
    views = [view(replica) for replica in replicas]
    failed = all(one.state is ReplicaState.FAILED for one in views)
    hopeless = policy.hopeless(views)
    what = "has failed" if failed else "could not be loaded" if hopeless else "is loading"
    kind = ModelFailed if hopeless else ServiceUnavailable
    return kind(
        f"the model {model} {what}" + (f": {reason}" if reason else ""),
        retry_after=RETRY_AFTER if failed else 5.0,
    )
