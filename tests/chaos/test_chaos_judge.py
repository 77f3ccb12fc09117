"""The judge: a good answer passes, and each way in which one can be wrong is called by its name."""

from __future__ import annotations

import json

import pytest

from slimproc.chaos.asking import wanted_text
from slimproc.chaos.exchange import Heard
from slimproc.chaos.judge import judge
from slimproc.chaos.schedule import Ask

STREAMED = Ask(id="c0-1", kind="completion", model="a", scripted=True, stream=True, tokens=3, max_tokens=9)
JOINED = Ask(id="c0-2", kind="chat", model="a", scripted=True, tokens=3, max_tokens=2)
DONE = "[DONE]"


def event(text="", finish=None, index=0):
    return {"choices": [{"index": index, "text": text, "finish_reason": finish}]}


def tokens(ask=STREAMED):
    return [event(f"<{ask.id}:{place}>") for place in range(ask.tokens)]


def error(code="engine_crashed"):
    return {"error": {"message": "m", "type": "t", "param": None, "code": code}}


def stream(*events, end=b"0\r\n\r\n"):
    parts = [f"data: {one if one == DONE else json.dumps(one)}\n\n".encode() for one in events]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + end


def whole(document, status=200, *, extra=b"", headers=""):
    body = json.dumps(document).encode()
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body + extra


def judged(data, ask=STREAMED, how="closed", first=0.1, ended=1.0):
    return judge(Heard(ask, 0.0, ended, first, data, how))


def rules(*args, **kwargs):
    return [one.rule for one in judged(*args, **kwargs)[1]]


@pytest.mark.parametrize(
    ("data", "ask", "end"),
    [
        (stream(*tokens(), event(finish="stop"), DONE), STREAMED, "ok"),
        (stream(tokens()[0], error(), DONE), STREAMED, "error"),
        (whole({"choices": [{"index": 0, "message": {"content": "<c0-2:0><c0-2:1>"}, "finish_reason": "length"}]}), JOINED, "ok"),
        (whole(error("overloaded"), 503, headers="Retry-After: 1\r\n"), JOINED, "error"),
        (whole({"error": "full", "src": "slimproc", "code": "QUEUE_FULL"}, 429, headers="Retry-After: 2\r\n"), JOINED, "error"),
    ],
    ids=["a stream", "an error in a stream", "a joined answer", "a refusal", "a refusal on /infer"],
)  # fmt: skip
def test_a_good_answer_has_one_end_and_no_violation(data, ask, end):
    told, violations = judged(data, ask)
    assert (told.end, violations) == (end, [])


def test_who_leaves_has_a_part_that_may_end_anywhere():
    data = stream(*tokens(), event(finish="stop"), DONE)
    for length in range(len(data)):
        told, violations = judged(data[:length], how="left")
        assert (told.end in ("left", "ok"), violations) == (True, [])


END = event(finish="stop")


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b"", "one end"),
        (b"HTTP/1.1 200 OK\r\n", "one end"),
        (stream(*tokens(), end=b""), "one end"),
        (stream(*tokens(), END), "one end"),
        (stream(*tokens(), END, DONE, DONE), "one end"),
        (stream(*tokens(), END, DONE, event("x")), "one end"),
        (stream(*tokens(), END, DONE, error()), "one end"),
        (stream(*tokens(), error(), error(), DONE), "one end"),
        (stream(*tokens(), error(), END, DONE), "one end"),
        (stream(*tokens(), END, END, DONE), "one end"),
        (stream(*tokens(), END, event("x"), DONE), "one end"),
        (stream(*tokens(), DONE), "one end"),
        (stream(*tokens(), END, DONE) + b"HTTP/1.1 200 OK\r\n\r\n", "one end"),
        (stream(*tokens()[:2], END, DONE), "whole answers"),
        (stream(tokens()[0], tokens()[2], END, DONE), "own tokens in order"),
        (stream(tokens()[0], tokens()[0], END, DONE), "own tokens in order"),
        (stream(event("<c9-9:0>"), END, DONE), "own tokens in order"),
        (stream(*tokens(), event(finish="length"), DONE), "whole answers"),
        (stream(error("internal_error"), DONE), "no bug of ours"),
        (whole(error("invalid_request_error"), 400), "good requests are not called bad"),
        (whole(error("overloaded"), 503), "refusals say when to come back"),
        (whole(error("overloaded"), 503, headers="Retry-After: 0\r\n"), "refusals say when to come back"),
        (whole(error("overloaded"), 503, headers="Retry-After: 1\r\n", extra=b"x"), "one end"),
        (whole({}, 500), "one end"),
    ],
)
def test_what_is_wrong_with_an_answer_is_found(data, rule):
    assert rule in rules(data)


def test_a_token_of_another_request_is_found_also_in_what_was_left_early():
    assert rules(stream(tokens()[0], event("<c0-3:1>"), end=b""), how="left") == ["own tokens in order"]


def test_a_request_without_an_end_is_lost_and_a_reset_is_no_end():
    assert rules(b"", how="lost", ended=150) == ["one end"]
    assert rules(stream(*tokens(), end=b""), how="reset") == ["one end"]


def test_a_slow_reader_may_be_dropped_but_not_left_without_a_word():
    slow = Ask(id="c0-1", kind="completion", model="a", scripted=True, stream=True, tokens=3, max_tokens=9, slow=2.0)
    assert rules(stream(*tokens(), end=b""), slow, how="reset") == []
    assert rules(b"", slow, how="reset") == ["one end"]


def test_a_refusal_that_took_long_is_found():
    data = whole(error("overloaded"), 503, headers="Retry-After: 1\r\n")
    assert rules(data, first=15.0) == ["refusals are immediate"]


def test_every_choice_has_its_own_end():
    ask = Ask(id="c0-1", kind="completion", model="a", scripted=True, stream=True, n=2, tokens=3, max_tokens=9)
    first = [*tokens(), END]
    second = [event(one["choices"][0]["text"], one["choices"][0]["finish_reason"], index=1) for one in first]
    assert rules(stream(*first, *second, DONE), ask) == []
    assert rules(stream(*first, *second[:-1], DONE), ask) == ["one end"]


def test_a_bad_body_that_is_answered_or_fails_the_server_is_found():
    bad = Ask(id="c0-1", kind="bad", model="a")
    assert rules(whole(error("invalid_request_error"), 400), bad) == []
    assert rules(whole({"choices": []}), bad) == ["bad bodies are refused"]
    assert rules(whole(error("engine_error"), 500), bad) == ["bad bodies are refused"]


def test_vectors_are_counted():
    ask = Ask(id="c0-1", kind="embedding", model="a", n=2)
    assert rules(whole({"data": [{}, {}]}), ask) == []
    assert rules(whole({"data": [{}]}), ask) == ["whole answers"]


def test_a_text_that_is_repeated_is_the_same_text_again():
    ask = Ask(id="r", kind="completion", model="a", scripted=True, tokens=2, repeat=2, max_tokens=3)
    assert wanted_text(ask) == "<r:0><r:1><r:0>"
