"""How errors look: one shape, nothing of our insides, and headers that SDKs obey."""

from __future__ import annotations

import json
import math

import pytest
from aiohttp import web

from slimproc import errors
from slimproc.http.errors import MAX_MESSAGE, error_body, error_response, plain_error, sse_error

TOLD = [
    (errors.InvalidRequest("temperature: too hot", param="temperature"), 400, "invalid_request_error"),
    (errors.ContextLengthExceeded("the prompt has 1000 tokens", param="prompt"), 400, "context_length_exceeded"),
    (errors.ModelNotFound("no model 'x'", param="model"), 404, "model_not_found"),
    (errors.NotFound("no route"), 404, "not_found"),
    (errors.MethodNotAllowed("no"), 405, "method_not_allowed"),
    (errors.BodyTimeout("slow"), 408, "request_timeout"),
    (errors.BodyTooLarge("big"), 413, "body_too_large"),
    (errors.UnsupportedMediaType("gzip"), 415, "unsupported_media_type"),
    (errors.ExpectationFailed("what"), 417, "expectation_failed"),
    (errors.Overloaded("full", retry_after=3), 503, "overloaded"),
    (errors.ServiceUnavailable("loading"), 503, "service_unavailable"),
    (errors.LoadFailed("not a model"), 503, "service_unavailable"),
    (errors.ShuttingDown("bye"), 503, "shutting_down"),
    (errors.DeadlineExceeded("late"), 504, "timeout"),
    (errors.InternalError("secret"), 500, "internal_error"),
    (errors.EngineError("hiccup"), 500, "engine_error"),
    (errors.EngineCrashed("dead"), 500, "engine_crashed"),
    (errors.InsufficientMemory("too big"), 503, "insufficient_memory"),
    (errors.ModelFailed("no"), 503, "service_unavailable"),
    (errors.BackendFailed("gone"), 502, "bad_gateway"),
    (errors.QueueTimeout("late"), 504, "timeout"),
]


@pytest.mark.parametrize(("error", "status", "code"), TOLD, ids=lambda value: getattr(value, "code", None))
def test_every_error_is_openais_object_with_its_status_and_code(error, status, code):
    response = error_response(error)
    assert isinstance(response.body, bytes)
    told = json.loads(response.body)
    assert list(told) == ["error"]
    assert list(told["error"]) == ["message", "type", "param", "code"]
    assert (response.status, told["error"]["code"]) == (status, code)
    assert told["error"]["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert told["error"]["param"] == error.param
    assert response.content_type == "application/json"
    assert told["error"]["message"]


@pytest.mark.parametrize(("error", "status", "code"), TOLD, ids=lambda value: getattr(value, "code", None))
def test_on_infer_every_error_is_one_flat_object(error, status, code):
    told = json.loads(error_body(error, infer=True))
    assert list(told) == ["error", "src", "code"]
    assert told["src"] == "slimproc"
    assert told["error"] == json.loads(error_body(error))["error"]["message"]
    assert told["code"] == told["code"].upper()


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.InvalidRequest("no"), 400, "BAD_REQUEST"),
        (errors.ContextLengthExceeded("no"), 400, "BAD_REQUEST"),
        (errors.ModelNotFound("no"), 404, "NOT_FOUND"),
        (errors.NotFound("no"), 404, "NOT_FOUND"),
        (errors.MethodNotAllowed("no"), 405, "METHOD_NOT_ALLOWED"),
        (errors.BodyTimeout("no"), 408, "BODY_TIMEOUT"),
        (errors.BodyTooLarge("no"), 413, "BODY_TOO_LARGE"),
        (errors.UnsupportedMediaType("no"), 415, "BAD_REQUEST"),
        (errors.ExpectationFailed("no"), 417, "BAD_REQUEST"),
        (errors.Overloaded("no"), 429, "QUEUE_FULL"),
        (errors.ModelFailed("no"), 502, "LOAD_FAILED"),
        (errors.LoadFailed("no"), 502, "LOAD_FAILED"),
        (errors.UnloadFailed("no"), 502, "UNLOAD_FAILED"),
        (errors.BackendFailed("no"), 502, "BACKEND"),
        (errors.EngineError("no"), 502, "BACKEND"),
        (errors.EngineCrashed("no"), 502, "BACKEND"),
        (errors.EngineCrashedTwice("no"), 502, "BACKEND"),
        (errors.InsufficientMemory("no"), 503, "RESOURCES"),
        (errors.NotReady("no"), 503, "NOT_READY"),
        (errors.ServiceUnavailable("no"), 503, "NOT_READY"),
        (errors.LifecyclePending("no"), 503, "LIFECYCLE_PENDING"),
        (errors.ShuttingDown("no"), 503, "SHUTDOWN"),
        (errors.QueueTimeout("no"), 504, "QUEUE_TIMEOUT"),
        (errors.DrainTimeout("no"), 504, "DRAIN_TIMEOUT"),
        (errors.DeadlineExceeded("no"), 504, "BACKEND"),
        (errors.InternalError("no"), 500, "BACKEND"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, errors.SlimprocError) else None,
)
def test_on_infer_every_error_has_its_status_and_code(error, status, code):
    response = error_response(error, infer=True)
    assert isinstance(response.body, bytes)
    assert (response.status, json.loads(response.body)["code"]) == (status, code)


@pytest.mark.parametrize("infer", [False, True])
def test_the_plan_stands_beside_the_error(infer):
    error = errors.InsufficientMemory("too big", plan={"needed": 5, "victims": ["a/0"]})
    told = json.loads(error_body(error, infer=infer))
    assert told["plan"] == {"needed": 5, "victims": ["a/0"]}
    if not infer:
        assert list(told["error"]) == ["message", "type", "param", "code"]
        assert told["error"]["code"] == "insufficient_memory"


@pytest.mark.parametrize(
    ("seconds", "header"), [(0, "1"), (0.2, "1"), (2.1, "3"), (59.5, "60"), (1e9, "60"), (math.inf, "60")]
)
def test_retry_after_is_whole_seconds_from_1_to_60(seconds, header):
    assert error_response(errors.Overloaded("full", retry_after=seconds)).headers["Retry-After"] == header


def test_only_what_must_not_be_tried_again_says_so():
    assert error_response(errors.DeadlineExceeded("late")).headers["x-should-retry"] == "false"
    for other in (errors.Overloaded("full"), errors.EngineCrashed("dead"), errors.BodyTimeout("slow")):
        headers = error_response(other).headers
        assert "x-should-retry" not in headers
        assert "Retry-After" not in headers


@pytest.mark.parametrize("error", [errors.BodyTooLarge(""), errors.BodyTimeout(""), errors.ExpectationFailed("")])
def test_after_an_unread_body_the_connection_is_not_kept(error):
    assert error_response(error).keep_alive is False


@pytest.mark.parametrize(
    "error", [errors.InternalError, errors.ConfigError, errors.RingCorrupt, errors.IllegalTransition]
)
def test_errors_that_are_not_for_callers_give_no_word_away(error):
    told = json.loads(error_body(error("replica 3 in /srv/x", param="secret")))["error"]
    assert told["code"] == "internal_error"
    assert told["param"] is None
    assert "replica" not in told["message"]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("no such file: /home/anna/models/x.gguf", "no such file: x.gguf"),
        ("cannot open '/srv/m/a b.gguf'", "cannot open 'a b.gguf'"),
        ("http://127.0.0.1:8080/v1/x refused", "http://127.0.0.1:8080/v1/x refused"),
        ("exit code 1\nTraceback (most recent call last):\n  File /x/y.py", "exit code 1"),
    ],
)
def test_what_failed_on_our_side_is_told_without_directories_and_tracebacks(message, told):
    assert json.loads(error_body(errors.LoadFailed(message)))["error"]["message"] == told


def test_a_callers_own_words_are_quoted_as_they_were():
    message = "there is no route GET /v1/nope/x"
    assert json.loads(error_body(errors.NotFound(message)))["error"]["message"] == message


def test_long_messages_are_cut():
    told = json.loads(error_body(errors.ModelNotFound("x" * 1_000_000)))["error"]["message"]
    assert len(told) == MAX_MESSAGE


def test_a_name_from_the_file_system_that_is_no_text_does_not_break_the_answer():
    assert json.loads(error_body(errors.LoadFailed("bad\udcff name")))["error"]["message"] == "bad? name"


def test_a_stream_hears_of_an_error_in_one_event():
    event = sse_error(errors.EngineCrashed("two\nlines"))
    assert event.startswith(b'data: {"error":{')
    assert event.endswith(b"}}\n\n")
    assert event.count(b"\n") == 2


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (431, "invalid_request_error"), (501, "server_error")]
)
def test_statuses_without_an_error_class_have_the_same_shape(status, kind):
    response = plain_error(status, "no")
    assert isinstance(response, web.Response)
    assert isinstance(response.body, bytes)
    assert json.loads(response.body)["error"]["type"] == kind
