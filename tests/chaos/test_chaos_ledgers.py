"""Both sides' records: forged histories in which something is missing, twice or left over are all found."""

from __future__ import annotations

import pytest

from slimproc.chaos import ledgers, leftovers
from slimproc.chaos.verdict import Sight, Told

MIB = 1 << 20


def line(request, outcome="ok", message="generation finished", **fields):
    return {"message": message, "request_id": request, "outcome": outcome, **fields}


def told(request, end="ok", code=""):
    return Told(request, "a", end, code)


def rules(violations):
    return [one.rule for one in violations]


def metrics(**numbers):
    """``requests_total__ok=2``: the name, and the value of its one label."""
    found = {}
    for key, value in numbers.items():
        name, _, label = key.partition("__")
        kind = {"requests_total": "outcome", "rejected_total": "reason", "memory_bytes": "kind"}.get(name, "model")
        found[name, ((kind, label),)] = value
    return found


GOOD = [
    (told("r"), [line("r")]),
    (told("r", "error", "engine_crashed"), [line("r", "engine_crashed")]),
    (told("r", "error", "timeout"), [line("r", "timeout")]),
    (told("r", "error", "BACKEND"), [line("r", "engine_crashed")]),
    (told("r", "error", "overloaded"), []),
    (told("r", "error", "invalid_request_error"), []),
    (told("r", "error", "context_length_exceeded"), [line("r", "invalid")]),
    (told("r", "error", "service_unavailable"), [line("r", "unavailable")]),
    (told("r", "left"), []),
    (told("r", "left"), [line("r", "ok")]),
    (told("r", "left"), [line("r", "cancelled")]),
]


@pytest.mark.parametrize(("one", "lines"), GOOD)
def test_records_that_agree_pass(one, lines):
    assert ledgers.compare([one], lines) == []


@pytest.mark.parametrize(
    ("records", "lines", "rule"),
    [
        ([told("r")], [], "both sides agree"),
        ([told("r")], [line("r", "engine_crashed")], "both sides agree"),
        ([told("r")], [line("r"), line("r")], "one end"),
        ([told("r", "left")], [line("r", "cancelled"), line("r")], "one end"),
        ([told("r"), told("r")], [line("r")], "one end"),
        ([told("r", "error", "engine_crashed")], [], "both sides agree"),
        ([told("r", "error", "engine_crashed")], [line("r")], "both sides agree"),
        ([told("r", "error", "timeout")], [line("r", "cancelled")], "both sides agree"),
        ([told("r", "error", "overloaded")], [line("r")], "both sides agree"),
        ([], [line("ghost")], "both sides agree"),
    ],
)
def test_records_that_differ_are_found(records, lines, rule):
    assert rules(ledgers.compare(records, lines)) == [rule]


def test_counters_agree_with_what_was_sent_and_logged():
    records = [told("a"), told("b"), told("c", "error", "overloaded"), told("d", "left")]
    lines = [line("a"), line("b")]
    for rejected in (1, 2):
        now = Sight(metrics=metrics(requests_total__ok=2, rejected_total__overloaded=rejected))
        assert ledgers.count(records, lines, now) == []
    for ok, rejected in ((2, 0), (2, 3), (1, 1), (3, 1)):
        now = Sight(metrics=metrics(requests_total__ok=ok, rejected_total__overloaded=rejected))
        assert rules(ledgers.count(records, lines, now)).count("counters") > 0


BEFORE = Sight(descriptors=20, threads=3, children={1: "renderer", 2: "probe"}, states=[("a", "stopped")])


def after(**changes):
    same = {"descriptors": 20, "threads": 3, "children": {7: "renderer", 8: "probe"}, "states": [("a", "stopped")]}
    return Sight(**(same | changes))


def test_a_server_that_is_as_it_was_has_nothing_left_over():
    assert leftovers.left_over(BEFORE, after()) == []
    assert leftovers.left_over(BEFORE, after(descriptors=18)) == []


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"descriptors": 21}, "nothing is left over"),
        ({"threads": 4}, "nothing is left over"),
        ({"children": {7: "engine", 8: "probe"}}, "nothing is left over"),
        ({"children": {7: "renderer", 8: "probe", 9: "other"}}, "nothing is left over"),
        ({"metrics": metrics(queue_depth__a=1)}, "the server comes to rest"),
        ({"metrics": metrics(inflight_requests__a=1)}, "the server comes to rest"),
        ({"states": [("a", "killing")]}, "the server comes to rest"),
        ({"metrics": metrics(memory_bytes__held=5)}, "held bytes are live replicas' claims"),
    ],
)
def test_what_is_left_over_is_found(changes, rule):
    assert rule in rules(leftovers.left_over(BEFORE, after(**changes)))


def test_held_bytes_are_the_claims_of_what_lives():
    states = [("a", "ready"), ("a", "ready"), ("b", "stopped")]
    claim = {"a": 300, "b": 500}
    good = Sight(states=states, reserved={"a": 600, "b": 0}, metrics=metrics(memory_bytes__held=600))
    assert leftovers.claims(good, claim) == []
    leaked = Sight(states=states, reserved={"a": 600, "b": 500}, metrics=metrics(memory_bytes__held=1100))
    lost = Sight(states=states, reserved={"a": 300, "b": 0}, metrics=metrics(memory_bytes__held=300))
    untrue = Sight(states=states, reserved={"a": 600, "b": 0}, metrics=metrics(memory_bytes__held=700))
    for bad in (leaked, lost, untrue):
        assert set(rules(leftovers.claims(bad, claim))) == {"held bytes are live replicas' claims"}


def test_a_device_that_has_promised_more_than_it_has_is_found():
    def now(held):
        numbers = {"total": 1000, "held": held}
        return Sight(metrics={("memory_bytes", (("device", "host"), ("kind", kind))): n for kind, n in numbers.items()})

    assert leftovers.overcommitted(now(1000)) == []
    assert rules(leftovers.overcommitted(now(1001))) == ["no device promises more than it has"]


def test_memory_that_grows_all_along_is_found_and_one_peak_is_not():
    flat = [(second, (100 + (80 if second == 30 else 0)) * MIB) for second in range(60)]
    slope = [(second, (100 + 2 * second) * MIB) for second in range(60)]
    assert leftovers.growth(flat) == []
    assert rules(leftovers.growth(slope)) == ["memory is bounded"]


def test_tracebacks_and_bugs_in_the_log_are_found():
    assert leftovers.complaints([line("r")], ["a warning of a library"]) == []
    assert rules(leftovers.complaints([line("r", exception="Traceback")], [])) == ["no traceback"]
    assert rules(leftovers.complaints([{"message": "a bug ends a server's life", "error": "E"}], [])) == [
        "no traceback"
    ]
    assert rules(leftovers.complaints([], ["Traceback (most recent call last):"])) == ["no traceback"]
