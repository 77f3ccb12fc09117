"""How an error looks on ``/infer``: one flat object, with codes and statuses that are InferSwap's."""

from __future__ import annotations

from typing import Final, NamedTuple

from slimproc import errors
from slimproc.errors import SlimprocError

PATH: Final = "/infer"

SOURCE: Final = "slimproc"
"""The ``src`` of every error that did not come from a model's own server."""


class Told(NamedTuple):
    """What a caller is told: the status, and the code of the body."""

    status: int
    code: str


BACKEND: Final = "BACKEND"
"""A failure that has no more specific code."""

_TABLE: Final[tuple[tuple[type[SlimprocError], Told], ...]] = (
    (errors.ModelNotFound, Told(404, "NOT_FOUND")),
    (errors.NotFound, Told(404, "NOT_FOUND")),
    (errors.MethodNotAllowed, Told(405, "METHOD_NOT_ALLOWED")),
    (errors.BodyTimeout, Told(408, "BODY_TIMEOUT")),
    (errors.BodyTooLarge, Told(413, "BODY_TOO_LARGE")),
    (errors.UnsupportedMediaType, Told(415, "BAD_REQUEST")),
    (errors.ExpectationFailed, Told(417, "BAD_REQUEST")),
    (errors.InvalidRequest, Told(400, "BAD_REQUEST")),
    (errors.Overloaded, Told(429, "QUEUE_FULL")),
    (errors.InsufficientMemory, Told(503, "RESOURCES")),
    (errors.ModelFailed, Told(502, "LOAD_FAILED")),
    (errors.LoadFailed, Told(502, "LOAD_FAILED")),
    (errors.UnloadFailed, Told(502, "UNLOAD_FAILED")),
    (errors.LifecyclePending, Told(503, "LIFECYCLE_PENDING")),
    (errors.ServiceUnavailable, Told(503, "NOT_READY")),
    (errors.ShuttingDown, Told(503, "SHUTDOWN")),
    (errors.QueueTimeout, Told(504, "QUEUE_TIMEOUT")),
    (errors.DrainTimeout, Told(504, "DRAIN_TIMEOUT")),
    (errors.DeadlineExceeded, Told(504, BACKEND)),
    (errors.BackendFailed, Told(502, BACKEND)),
    (errors.EngineError, Told(502, BACKEND)),
    (errors.EngineCrashed, Told(502, BACKEND)),
)
"""The first that fits counts, so what is special stands before what is general."""


def told(error: SlimprocError) -> Told:
    """Everything else is a bug of ours: 500."""
    return next((answer for kind, answer in _TABLE if isinstance(error, kind)), Told(500, BACKEND))


def told_for_status(status: int) -> Told:
    """For what HTTP itself refuses, where there is no error of ours."""
    return Told(status, "BAD_REQUEST" if status < 500 else BACKEND)
