"""Every error says whose fault it is, with a stable code and a status. (Its JSON is tested with ``http/errors.py``.)"""

from __future__ import annotations

import pytest

from slimproc import errors
from slimproc.errors import SlimprocError, error_of

WANTED = {
    "SlimprocError": (500, "internal_error", "server_error"),
    "InvalidRequest": (400, "invalid_request_error", "invalid_request_error"),
    "ContextLengthExceeded": (400, "context_length_exceeded", "invalid_request_error"),
    "ModelNotFound": (404, "model_not_found", "invalid_request_error"),
    "NotFound": (404, "not_found", "invalid_request_error"),
    "MethodNotAllowed": (405, "method_not_allowed", "invalid_request_error"),
    "BodyTimeout": (408, "request_timeout", "invalid_request_error"),
    "BodyTooLarge": (413, "body_too_large", "invalid_request_error"),
    "UnsupportedMediaType": (415, "unsupported_media_type", "invalid_request_error"),
    "ExpectationFailed": (417, "expectation_failed", "invalid_request_error"),
    "Overloaded": (503, "overloaded", "server_error"),
    "ServiceUnavailable": (503, "service_unavailable", "server_error"),
    "InsufficientMemory": (503, "insufficient_memory", "server_error"),
    "ModelFailed": (503, "service_unavailable", "server_error"),
    "UnloadFailed": (503, "service_unavailable", "server_error"),
    "LifecyclePending": (503, "service_unavailable", "server_error"),
    "NotReady": (503, "service_unavailable", "server_error"),
    "QueueTimeout": (504, "timeout", "server_error"),
    "DrainTimeout": (504, "timeout", "server_error"),
    "BackendFailed": (502, "bad_gateway", "server_error"),
    "ShuttingDown": (503, "shutting_down", "server_error"),
    "DeadlineExceeded": (504, "timeout", "server_error"),
    "InternalError": (500, "internal_error", "server_error"),
    "EngineError": (500, "engine_error", "server_error"),
    "EngineCrashed": (500, "engine_crashed", "server_error"),
    "EngineCrashedTwice": (500, "engine_crashed", "server_error"),
    "Quarantined": (500, "engine_crashed", "server_error"),
    "LoadFailed": (503, "service_unavailable", "server_error"),
    "ConfigError": (500, "config_error", "server_error"),
    "RingCorrupt": (500, "ring_corrupt", "server_error"),
    "IllegalTransition": (500, "illegal_transition", "server_error"),
}
"""The contract with clients: what is written here changes only on purpose."""

ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SlimprocError)]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_an_error_has_its_status_code_and_type(kind):
    assert (kind.status, kind.code, kind.type) == WANTED[kind.__name__]


def test_only_what_a_second_try_makes_worse_is_not_to_be_retried():
    final = {"DeadlineExceeded", "QueueTimeout", "DrainTimeout", "EngineCrashedTwice", "Quarantined"}
    assert {kind.__name__ for kind in ALL if not kind.retryable} == final


def test_an_error_carries_its_message_its_field_and_when_to_come_back():
    error = errors.Overloaded("full", param="n", retry_after=3.0)
    assert (str(error), error.message, error.param, error.retry_after) == ("full", "full", "n", 3.0)
    assert errors.LoadFailed("no such file", permanent=True).permanent


@pytest.mark.parametrize("kind", [errors.InvalidRequest, errors.ContextLengthExceeded, errors.EngineError])
def test_an_engine_may_name_these_by_their_code(kind):
    error = error_of(kind.code, "message", "prompt")
    assert type(error) is kind
    assert (error.message, error.param) == ("message", "prompt")


@pytest.mark.parametrize("code", ["shutting_down", "timeout", "model_not_found", "", "nonsense"])
def test_whatever_else_an_engine_says_is_an_engine_error(code):
    assert type(error_of(code, "message")) is errors.EngineError
