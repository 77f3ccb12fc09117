"""What those who wait for a model are told when it cannot be had."""

from __future__ import annotations

import dataclasses

from slimproc.errors import InsufficientMemory, LifecyclePending, NotReady, SlimprocError
from slimproc.residency.views import Explanation, RefuseCode

_COME_BACK_AFTER = 5.0
"""Seconds."""


def refusal(code: RefuseCode, explanation: Explanation) -> SlimprocError:
    """The error for a plan's Refuse."""
    match code:
        case "insufficient_memory":
            return InsufficientMemory(explanation.reason, plan=dataclasses.asdict(explanation))
        case "lifecycle_pending":
            return LifecyclePending(explanation.reason, retry_after=_COME_BACK_AFTER)
        case "not_ready":
            return NotReady(explanation.reason, retry_after=_COME_BACK_AFTER)
