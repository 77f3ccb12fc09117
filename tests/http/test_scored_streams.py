"""Log probabilities on their way to a client: each route's layout, and which event carries which."""

from __future__ import annotations

import json

import pytest

from slimproc.http.openai.format import ChatFormat, CompletionFormat
from slimproc.http.openai.logprobs import chat_logprobs, legacy_logprobs
from slimproc.http.scored import ScoredEventStream, ScoredStream
from slimproc.http.sse import EventClient
from slimproc.ipc.wire import Logprob, ScoredTok, Tok
from slimproc.metrics import Metrics
from slimproc.request import Finish, GenerateRequest, Usage

HALF = b"\xf0\x9f"
HELLO = Logprob(b"Hello", -0.25, [(b"Hello", -0.25), (HALF, -2.0)], 0)
PART = Logprob(HALF, -1.5, [(b"Hi", -0.5), (b"\xff", -1.0)], 5)
FIRST = Logprob(b"The", None, [], 0)
TOKEN = {"token": "Hello", "logprob": -0.25, "bytes": list(b"Hello")}


def test_a_chats_layout_has_tokens_bytes_and_lists_of_alternatives():
    half = {"token": "\ufffd", "logprob": -2.0, "bytes": [0xF0, 0x9F]}
    assert chat_logprobs([HELLO]) == {"content": [{**TOKEN, "top_logprobs": [TOKEN, half]}], "refusal": None}
    assert chat_logprobs([Logprob(b"", -1.0, [], 0)])["content"] == [
        {"token": "", "logprob": -1.0, "bytes": [], "top_logprobs": []}
    ]
    assert chat_logprobs([]) == {"content": [], "refusal": None}


def test_a_completions_layout_is_the_legacy_one():
    assert legacy_logprobs([FIRST, HELLO, PART], 2) == {
        "tokens": ["The", "Hello", "\ufffd"],
        "token_logprobs": [None, -0.25, -1.5],
        # The token itself is among its alternatives; of two that show the same text the likelier one stays.
        "top_logprobs": [None, {"Hello": -0.25, "\ufffd": -2.0}, {"Hi": -0.5, "\ufffd": -1.0}],
        "text_offset": [0, 0, 5],
    }


def test_a_token_that_is_not_among_its_alternatives_is_added_to_them():
    unlikely = Logprob(b"Yo", -7.0, [(b"Hi", -0.5), (b"Hello", -1.0)], 0)
    assert legacy_logprobs([unlikely], 2)["top_logprobs"] == [{"Hi": -0.5, "Hello": -1.0, "Yo": -7.0}]


def test_without_alternatives_a_completion_has_no_list_of_them():
    assert legacy_logprobs([HELLO], 0)["top_logprobs"] is None


class Transport:
    def __init__(self) -> None:
        self.written = b""

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    @property
    def choices(self) -> list[dict]:
        return [json.loads(event[6:])["choices"][0] for event in self.written.decode().split("\n\n") if event]


def streamed(kind, items: list[Tok]) -> tuple[list[dict], ScoredEventStream]:
    answer = kind(GenerateRequest(id="r", model="m", prompts=["p"], logprobs=2))
    client, transport = EventClient(), Transport()
    client.attach(transport, chunked=False, prelude=b"")
    gaps = Metrics(["m"]).model("m").inter_token
    stream = ScoredEventStream(0, client, event=answer.scored_event, finish_events=answer.finish_events(0), gaps=gaps)
    gathering: list = []
    for at, item in enumerate(items, 1):
        stream.take(item, at, gathering)
    assert not gathering
    return transport.choices, stream


END = ScoredTok(1, "", 1, int(Finish.LENGTH), Usage(1, 3, 0), [PART])
ITEMS = [ScoredTok(1, "Hello", 1, logprobs=[HELLO]), ScoredTok(1, "!", 1, logprobs=[]), END]


def test_each_event_carries_the_log_probabilities_of_its_own_text():
    events, stream = streamed(ChatFormat, ITEMS)
    assert [event["delta"] for event in events] == [{"content": "Hello"}, {"content": "!"}, {"content": ""}, {}]
    assert [event["logprobs"] and len(event["logprobs"]["content"]) for event in events] == [1, 0, 1, None]
    assert [event["finish_reason"] for event in events] == [None, None, None, "length"]
    assert (stream.completion_tokens, stream.finish) == (3, Finish.LENGTH)


def test_a_streamed_completion_has_the_legacy_layout():
    events, _ = streamed(CompletionFormat, ITEMS)
    assert [event["text"] for event in events] == ["Hello", "!", "", ""]
    assert [event["logprobs"] and event["logprobs"]["text_offset"] for event in events] == [[0], [], [5], None]


@pytest.mark.parametrize("kind", [ChatFormat, CompletionFormat])
def test_an_answer_in_one_piece_has_all_of_them_in_order(kind):
    stream = ScoredStream()
    for item in ITEMS:
        stream.take(item, 1, None)
    answer = kind(GenerateRequest(id="r", model="m", prompts=["p"], logprobs=2))
    (choice,) = json.loads(answer.body([stream]))["choices"]
    expected = chat_logprobs([HELLO, PART]) if kind is ChatFormat else legacy_logprobs([HELLO, PART], 2)
    assert choice["logprobs"] == expected


def test_a_second_try_begins_without_those_of_the_first():
    stream = ScoredStream()
    stream.take(ScoredTok(1, "", 0, logprobs=[PART]), 1, None)
    stream.reset()
    assert stream.logprobs == []
