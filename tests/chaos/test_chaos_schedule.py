"""What a seed decides: the same one, the same requests and faults; whatever the clock does."""

from __future__ import annotations

import itertools
import json

import pytest

from slimproc.chaos.asking import request_of, wanted_text
from slimproc.chaos.schedule import FAULTS, KINDS, Ask, Target, asks_of, faults_of

TARGETS = [Target("a", scripted=True), Target("b", scripted=True), Target("real", scripted=False)]


def asks(seed, client=0, count=300):
    return list(itertools.islice(asks_of(seed, client, TARGETS), count))


def faults(seed, count=300, every=5.0):
    return list(itertools.islice(faults_of(seed, TARGETS, every), count))


def test_the_same_seed_has_the_same_requests_and_faults():
    assert asks(7) == asks(7)
    assert faults(7) == faults(7)


def test_another_seed_and_another_client_have_others():
    assert [one.kind for one in asks(7)] != [one.kind for one in asks(8)]
    assert [one.kind for one in asks(7)] != [one.kind for one in asks(7, client=1)]
    assert [one.kind for one in faults(7)] != [one.kind for one in faults(8)]


def test_no_two_requests_have_one_id():
    ids = [one.id for client in range(4) for one in asks(7, client)]
    ids += [one.id for fault in faults(7) for one in fault.asks]
    assert len(ids) == len(set(ids))


def test_every_kind_of_request_and_fault_is_drawn():
    assert {one.kind for one in asks(7)} == set(KINDS)
    assert {one.kind for one in faults(7)} == set(FAULTS)
    drawn = asks(7, count=1000)
    assert {one.leave for one in drawn} == {"", "close", "reset"}
    for property_ in ("stream", "slow", "timeout"):
        assert {bool(getattr(one, property_)) for one in drawn} == {True, False}
    assert {one.n for one in drawn} == {1, 2, 3}
    assert {one.repeat > 1 for one in drawn} == {True, False}


def test_faults_come_as_often_as_was_said_on_average():
    gaps = [one.gap for one in faults(7, every=2.0)]
    assert 1.5 < sum(gaps) / len(gaps) < 2.5


def test_a_model_that_makes_only_vectors_is_asked_for_nothing_else():
    kinds = {one.kind for one in itertools.islice(asks_of(1, 0, [Target("e", scripted=False, generates=False)]), 200)}
    assert kinds == {"embedding", "bad"}


def test_a_request_is_whole_and_its_script_is_its_own():
    ask = Ask(id="c1-2", kind="completion", model="a", scripted=True, tokens=3, max_tokens=2, timeout=1.5)
    head, _, body = request_of(ask, "host:1").partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert b"X-Request-Timeout: 1.5" in head
    assert b"X-Request-Id: c1-2" in head
    script = json.loads(json.loads(body)["prompt"].partition("!fake ")[2])
    assert script["tokens"] == ["<c1-2:0>", "<c1-2:1>", "<c1-2:2>"]
    assert wanted_text(ask) == "<c1-2:0><c1-2:1>"


@pytest.mark.parametrize("kind", ["die_at", "hang_at", "error_at"])
def test_a_scripted_fault_is_in_the_prompt(kind):
    (ask,) = next(one.asks for one in faults(7) if one.kind == kind and one.asks)
    body = json.loads(request_of(ask, "h").partition(b"\r\n\r\n")[2])
    assert json.loads(body["prompt"].partition("!fake ")[2])[kind] == ask.at
