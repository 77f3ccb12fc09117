"""What counts as an answer of the control contract, and what does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slimproc.upstream.contract import ContractViolated, ControlRefused, Status, read

GOOD = {"state": "ready", "residency": "resident", "active_requests": 0, "last_error": None}


def body(**changes: Any) -> bytes:
    return json.dumps(GOOD | changes).encode()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"active_requests": 7},
        {"state": "unloaded", "residency": "not_resident"},
        {"state": "loading", "residency": "unknown"},
        {"state": "unloading", "residency": "resident", "active_requests": 1},
        {"state": "failed", "residency": "not_resident", "last_error": {"code": "OOM", "message": "no room"}},
        {"state": "failed", "residency": "unknown", "last_error": {"code": "OOM", "message": "no room", "more": 1}},
        {"version": 2, "error": None},
    ],
    ids=str,
)
def test_every_state_of_the_contract_is_read(changes):
    status = read(200, body(**changes))
    assert isinstance(status, Status)
    wanted = GOOD | changes
    assert (status.state, status.residency) == (wanted["state"], wanted["residency"])
    assert status.active_requests == wanted["active_requests"]


@pytest.mark.parametrize("missing", list(GOOD))
def test_all_four_fields_must_be_there(missing):
    rest = {key: value for key, value in GOOD.items() if key != missing}
    with pytest.raises(ContractViolated, match=missing):
        read(200, json.dumps(rest).encode())


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "sleeping"},
        {"state": "READY"},
        {"state": None},
        {"residency": "somewhere"},
        {"residency": None},
        {"active_requests": -1},
        {"active_requests": "0"},
        {"active_requests": 0.5},
        {"active_requests": True},
        {"active_requests": None},
        {"last_error": "oops"},
        {"last_error": {"code": "X"}},
        {"last_error": []},
    ],
    ids=str,
)
def test_a_value_of_the_wrong_kind_is_no_status(changes):
    with pytest.raises(ContractViolated, match=f"answered no control status.*{next(iter(changes))}"):
        read(200, body(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"residency": "not_resident"}, "ready, and not_resident"),
        ({"residency": "unknown"}, "ready, and unknown"),
        ({"state": "unloaded"}, "unloaded, and resident"),
        ({"state": "unloaded", "residency": "unknown"}, "unloaded, and unknown"),
        ({"state": "unloaded", "residency": "not_resident", "active_requests": 2}, "2 requests"),
        ({"error": {"code": "BUSY", "message": ""}}, "an error as well"),
    ],
    ids=str,
)
def test_a_status_that_contradicts_itself_is_none(changes, words):
    with pytest.raises(ContractViolated, match=words):
        read(200, body(**changes))


@pytest.mark.parametrize(
    "answer",
    [b"", b"ok", b"null", b"[]", b"{}", b"<html></html>", b"\xff\xfe", body() + b"x", b"[" * 60_000, b'{"state":' * 9],
    ids=lambda answer: answer[:20].decode(errors="replace"),
)
def test_what_is_not_json_of_the_contract_is_a_strangers_answer(answer):
    with pytest.raises(ContractViolated):
        read(200, answer)
    with pytest.raises(ContractViolated, match="answered 500 without"):
        read(500, answer)


def test_a_refusal_is_known_by_its_code():
    with pytest.raises(ControlRefused) as caught:
        read(409, b'{"error": {"code": "BUSY", "message": "runtime has active inference requests"}}')
    assert caught.value.code == "BUSY"
    assert "active inference" in caught.value.reason
    with pytest.raises(ControlRefused) as caught:
        read(500, b'{"error": {"code": "X"}}')
    assert caught.value.reason == "X"


@pytest.mark.parametrize("status", [201, 202, 204, 302, 404])
def test_only_200_is_a_success(status):
    with pytest.raises(ContractViolated, match=str(status)):
        read(status, body())


def test_what_a_stranger_says_is_cut_short():
    with pytest.raises(ControlRefused) as caught:
        read(500, json.dumps({"error": {"code": "C" * 5000, "message": "M" * 5000}}).encode())
    assert len(caught.value.reason) < 500
