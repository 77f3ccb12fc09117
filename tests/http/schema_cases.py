"""What the tests of both bodies share: how a body is made, and how a refusal is asserted."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from slimproc.errors import InvalidRequest
from slimproc.http.openai.call import Call
from slimproc.request import Deadline, GenerateRequest


class Limits(NamedTuple):
    name: str = "m"
    max_tokens_limit: int | None = None
    on_crash: str = "fail"


def work(call: Call, limit: int | None = None) -> GenerateRequest:
    return call.work(request_id="r", model=Limits(max_tokens_limit=limit), deadline=Deadline(9.0))


def refused(parse: Callable[[bytes], Any], body: bytes | dict[str, Any]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(body if isinstance(body, bytes) else json.dumps(body).encode())
    assert caught.value.status == 400
    return caught.value


BAD_FIELDS = [
    ("n", [0, -1, 129, 1.0, "1", True]),
    ("max_tokens", [-1, 2.5, "5", True, [], -1.0]),
    ("temperature", [-0.1, 2.1, "1", True, []]),
    ("top_p", [0, -1, 1.01, "x"]),
    ("top_k", [-2, 1.5, "x", 2**31]),
    ("min_p", [-0.1, 1.1]),
    ("seed", [1.5, 2**63, -(2**63) - 1, "7", True, 1e300]),
    ("presence_penalty", [-2.1, 2.1, "x"]),
    ("frequency_penalty", [-2.1, 2.1]),
    ("repetition_penalty", [0, -1, 2.1, 0.009, 1e-300]),
    ("stop", ["", [""], ["a", ""], [1], 5, {}, True, ["x"] * 17, "x" * 1001, [None]]),
    (
        "logit_bias",
        [[], {"x": 1}, {"-1": 1}, {"1.0": 1}, {"01": 1}, {" 1": 1}, {"": 1}, {"1": 101}, {"1": "x"}, {"9" * 12: 1}],
    ),
    ("logit_bias", [{str(number): 1 for number in range(1025)}]),
    ("stream", ["true", 1, []]),
    ("ignore_eos", [1, "yes"]),
    ("model", [1, [], {}, True]),
    ("stream_options", [[], "x", {"include_usage": True}, {}]),
]
"""Known fields with values that must be refused, naming the field, on both routes."""

BAD_FIELD_CASES = [
    pytest.param(name, value, id=f"{name}-{str(value)[:24]}") for name, values in BAD_FIELDS for value in values
]

RAW_NUMBERS = [b"NaN", b"-NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"9" * 5000, b"0x1", b".5", b"007"]

OPTIONAL = [
    "model", "stream", "stream_options", "n", "max_tokens", "stop", "temperature", "top_p", "top_k", "min_p", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "ignore_eos",
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_grammar", "guided_choice",
    "json_schema", "grammar",
]  # fmt: skip
