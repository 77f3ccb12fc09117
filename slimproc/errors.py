"""Every failure a caller can be told of, each with whose fault it is, a stable code and an HTTP status.

A leaf: it imports nothing of the package, so that any room can raise what any other room can translate.
Foreign exceptions become one of these once, at the border where they arise. Asserts stay for our own bugs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

EX_CONFIG = 78
"""sysexits.h: configuration error. The systemd unit does not retry it."""


class SlimprocError(Exception):
    """The base. ``code`` is stable and machine-readable; ``str(error)`` is for people."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "server_error"
    retryable: ClassVar[bool] = True
    """False sends ``x-should-retry: false``: an SDK that tries again only makes it worse."""

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after


# --- the caller's fault -------------------------------------------------------------------------------------


class InvalidRequest(SlimprocError):
    """A field is wrong; ``param`` names it."""

    status = 400
    code = "invalid_request_error"
    type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """The prompt alone fills the context (or the whole request cannot fit)."""

    code = "context_length_exceeded"


class ModelNotFound(InvalidRequest):
    status = 404
    code = "model_not_found"


class NotFound(InvalidRequest):
    status = 404
    code = "not_found"


class MethodNotAllowed(InvalidRequest):
    status = 405
    code = "method_not_allowed"


class BodyTimeout(InvalidRequest):
    status = 408
    code = "request_timeout"


class BodyTooLarge(InvalidRequest):
    status = 413
    code = "body_too_large"


class UnsupportedMediaType(InvalidRequest):
    status = 415
    code = "unsupported_media_type"


class ExpectationFailed(InvalidRequest):
    status = 417
    code = "expectation_failed"


# --- nobody's fault: too much at once, or not now -----------------------------------------------------------


class Overloaded(SlimprocError):
    """The queue is full. ``retry_after`` (seconds, at least 1) says when to come back."""

    status = 503
    code = "overloaded"


class ServiceUnavailable(SlimprocError):
    """The model cannot serve now: it is loading and the caller may not wait, or its load failed."""

    status = 503
    code = "service_unavailable"


class InsufficientMemory(ServiceUnavailable):
    """The model does not fit, even if everything that may be evicted were. ``plan`` says so in numbers."""

    code = "insufficient_memory"

    def __init__(self, message: str, *, plan: Mapping[str, object] | None = None) -> None:
        super().__init__(message, retry_after=5.0)
        self.plan = plan


class ModelFailed(ServiceUnavailable):
    """The model's load failed, or it has failed for good."""


class UnloadFailed(ServiceUnavailable):
    """What was to be unloaded for this model could not be."""


class LifecyclePending(ServiceUnavailable):
    """Something on the device is still being loaded or unloaded, and nobody can say when that ends."""


class NotReady(ServiceUnavailable):
    """There is no fresh sample of the device's memory, or the model's server is not ready to be forwarded to."""


class ShuttingDown(SlimprocError):
    status = 503
    code = "shutting_down"


class DeadlineExceeded(SlimprocError):
    """The request's one deadline passed, wherever it was: queue, load, prefill or decode."""

    status = 504
    code = "timeout"
    retryable = False


class QueueTimeout(DeadlineExceeded):
    """It waited for its turn as long as ``queue_timeout`` allows."""


class DrainTimeout(DeadlineExceeded):
    """The model that was to make room stayed busy as long as ``drain_timeout`` allows; it serves on."""


class BackendFailed(SlimprocError):
    """An upstream could not be reached, or broke off."""

    status = 502
    code = "bad_gateway"


# --- our fault, or the engine's -----------------------------------------------------------------------------


class InternalError(SlimprocError):
    """A bug of ours. The log has the traceback; the caller gets the request id."""


class EngineError(SlimprocError):
    """The engine failed on this one request and goes on serving others."""

    status = 500
    code = "engine_error"


class EngineCrashed(SlimprocError):
    """The engine process died with this request in it."""

    status = 500
    code = "engine_crashed"

    def __init__(self, message: str, *, inside_of: int | None = None) -> None:
        """``inside_of``: the number of the death, where the request was inside the native call that was fatal."""
        super().__init__(message)
        self.inside_of = inside_of


class EngineCrashedTwice(EngineCrashed):
    """The same on the second try: a third would cost a third engine, and others what is in it."""

    retryable = False


class Quarantined(EngineCrashedTwice):
    """Refused unseen: the same work has killed two engines."""


class LoadFailed(SlimprocError):
    """A model could not be loaded. ``permanent``: trying again cannot help (no such file, not a model).
    ``scarce``: it did not get the memory that it wanted, which may be there another time.
    """

    status = 503
    code = "service_unavailable"

    def __init__(self, message: str, *, permanent: bool = False, scarce: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent
        self.scarce = scarce


# --- never told to a caller ---------------------------------------------------------------------------------


class ConfigError(SlimprocError):
    """A setting is wrong; the message names source, key, line and the wanted type. ``serve`` exits 78."""

    code = "config_error"


class RingCorrupt(SlimprocError):
    """Published bytes do not say what the writer wrote. There is no resync: that engine is killed."""

    code = "ring_corrupt"


class IllegalTransition(SlimprocError):
    """A replica heard an event that its state has no row for. The state is unchanged."""

    code = "illegal_transition"


_TOLD_BY_ENGINES: dict[str, type[SlimprocError]] = {
    error.code: error for error in (InvalidRequest, ContextLengthExceeded, EngineError)
}


def error_of(code: str, message: str, param: str | None = None) -> SlimprocError:
    """The error that an engine named by its code; what it may not say becomes an EngineError."""
    return _TOLD_BY_ENGINES.get(code, EngineError)(message, param=param)
