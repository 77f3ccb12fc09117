"""Log probabilities through the whole server: both routes, streamed and joined, with the fake and with tiny models."""

from __future__ import annotations

import json
import math

import openai
import pytest

from tests import models
from tests.serving import CHAT, COMPLETIONS, ServerProcess, script

FLOOR = -9999.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logprobs")
    tiny = {"backend": "llama_cpp", "threads": 1, "slots": 2, "context": 512}
    config = {
        "default_model": "fake",
        "models": {
            "fake": {"backend": "fake", "slots": 4},
            "random": {**tiny, "path": str(models.tiny_random(folder / "random.gguf"))},
            "hello": {**tiny, "path": str(models.scripted(folder / "hello.gguf"))},
        },
    }
    process = ServerProcess(folder / "server", config)
    for model in config["models"]:
        process.wait_metric(1, "replicas", model=model, state="ready")
    yield process
    process.close()


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def strict(body: bytes):
    """JSON as its standard has it, which Python's reader does not insist on."""

    def refuse(word: str):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(body, parse_constant=refuse)


def joined(server, path: str, prompt: str, **fields):
    answer = server.begin(prompt, path=path, **fields).answer()
    assert answer.status == 200, answer.body
    (choice,) = strict(answer.body)["choices"]
    return choice, strict(answer.body)["usage"]


def streamed(server, path: str, prompt: str, **fields) -> list[dict]:
    """The choices of the events, in order."""
    with server.begin(prompt, path=path, stream=True, **fields).events() as reader:
        assert reader.status == 200
        events = list(reader.events())
    assert events.pop() == "[DONE]"
    assert not any("error" in event for event in events)
    return [event["choices"][0] for event in events]


class nearly:  # noqa: N801  # reads like pytest.approx, which does not look into nested lists and dicts
    """Equal but for the rounding of numbers: a prompt's second evaluation takes another part of it from the cache."""

    def __init__(self, value) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"nearly {self.value}"

    def __eq__(self, other: object) -> bool:
        value = self.value
        if isinstance(value, dict):
            return (
                isinstance(other, dict)
                and list(value) == list(other)
                and nearly([*value.values()]) == [*other.values()]
            )
        if isinstance(value, list):
            return (
                isinstance(other, list)
                and len(value) == len(other)
                and all(map(nearly.__eq__, map(nearly, value), other))
            )
        return other == (pytest.approx(value, abs=1e-3) if isinstance(value, float) else value)

    __hash__ = None


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["fake", "random", "hello"])
@pytest.mark.parametrize("count", [0, 3, 5])
def test_a_completion_has_the_legacy_layout(server, model, count):
    choice, usage = joined(server, COMPLETIONS, "hi", model=model, max_tokens=8, temperature=0, logprobs=count)
    its = choice["logprobs"]
    assert list(its) == ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    assert (
        len(its["tokens"]) == len(its["token_logprobs"]) == len(its["text_offset"]) == usage["completion_tokens"] == 8
    )
    assert all(math.isfinite(value) and value <= 0 for value in its["token_logprobs"])
    if count:
        assert len(its["top_logprobs"]) == 8
        for token, logprob, top in zip(its["tokens"], its["token_logprobs"], its["top_logprobs"], strict=True):
            assert 1 <= len(top) <= count + 1
            assert token in top
            assert max(top.values()) == logprob  # greedy
    else:
        assert its["top_logprobs"] is None


@pytest.mark.parametrize("model", ["fake", "random", "hello"])
def test_a_chat_has_its_own_layout(server, model):
    wanted = {"model": model, "max_tokens": 8, "temperature": 0, "logprobs": True}
    choice, usage = joined(server, CHAT, "hi", **wanted, top_logprobs=2)
    assert choice["logprobs"]["refusal"] is None
    content = choice["logprobs"]["content"]
    assert len(content) == usage["completion_tokens"] == 8
    for token in content:
        assert list(token) == ["token", "logprob", "bytes", "top_logprobs"]
        assert len(token["top_logprobs"]) == 2
        assert token["top_logprobs"][0] == {key: token[key] for key in ("token", "logprob", "bytes")}
    text = bytes(byte for token in content for byte in token["bytes"]).decode("utf-8", "replace")
    assert text.startswith(choice["message"]["content"])
    bare, _ = joined(server, CHAT, "hi", **wanted)
    assert [token["top_logprobs"] for token in bare["logprobs"]["content"]] == [[]] * 8


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_without_asking_there_are_none(server, path):
    choice, _ = joined(server, path, "hi", max_tokens=2)
    assert choice["logprobs"] is None
    assert {event["logprobs"] for event in streamed(server, path, "hi", max_tokens=2)} == {None}


@pytest.mark.parametrize("logprob", ["-inf", -1e300, -20000.5])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_logprob_of_minus_infinity_is_strict_json(server, path, logprob):
    asks = {"logprobs": 3} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 3}
    prompt = script(tokens=["a", "b"], logprob=logprob)
    choice, _ = joined(server, path, prompt, **asks)
    assert str(FLOOR) in json.dumps(choice["logprobs"])
    streamed(server, path, prompt, **asks)


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["fake", "random", "hello"])
def test_a_streamed_completion_says_the_same_as_a_joined_one_each_event_of_its_own_text(server, model):
    wanted = {"model": model, "max_tokens": 10, "temperature": 0, "logprobs": 2}
    choice, _ = joined(server, COMPLETIONS, "hi", **wanted)
    events = streamed(server, COMPLETIONS, "hi", **wanted)
    assert "".join(event["text"] for event in events) == choice["text"]
    for key, whole in choice["logprobs"].items():
        parts = [one for event in events if event["logprobs"] for one in event["logprobs"][key]]
        assert parts == nearly(whole)
    done = 0
    for event in events:
        offsets = event["logprobs"]["text_offset"] if event["logprobs"] else []
        assert all(done <= offset <= done + len(event["text"]) for offset in offsets)
        done += len(event["text"])


@pytest.mark.parametrize("model", ["fake", "random", "hello"])
def test_a_streamed_chat_says_the_same_as_a_joined_one(server, model):
    wanted = {"model": model, "max_tokens": 10, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    choice, _ = joined(server, CHAT, "hi", **wanted)
    events = streamed(server, CHAT, "hi", **wanted)
    content = [token for event in events if event["logprobs"] for token in event["logprobs"]["content"]]
    assert content == nearly(choice["logprobs"]["content"])
    assert "".join(event["delta"].get("content", "") for event in events) == choice["message"]["content"]


def test_characters_cut_across_tokens_keep_their_bytes_and_come_with_their_text(server):
    tokens = ["caf", {"hex": "c3"}, {"hex": "a9"}, {"hex": "f09f"}, {"hex": "9982"}, "!"]
    prompt = script(tokens=tokens)
    choice, _ = joined(server, COMPLETIONS, prompt, logprobs=0)
    assert choice["text"] == "café🙂!"
    assert choice["logprobs"]["tokens"] == ["caf", "\ufffd", "\ufffd", "\ufffd", "\ufffd\ufffd", "!"]
    assert choice["logprobs"]["text_offset"] == [0, 3, 3, 4, 4, 5]
    events = streamed(server, CHAT, prompt, logprobs=True)
    parts = [
        (event["delta"]["content"], [bytes(token["bytes"]) for token in event["logprobs"]["content"]])
        for event in events
        if event["logprobs"]
    ]
    text = "".join(text for text, _ in parts)
    assert text == "café🙂!"
    assert b"".join(piece for _, pieces in parts for piece in pieces).decode() == text
    assert all(b"".join(pieces).decode() == text for text, pieces in parts)


def test_tokens_behind_a_stop_string_are_not_reported(server):
    prompt = script(tokens=["one", " two", " th", "ree", " four"])
    choice, usage = joined(server, COMPLETIONS, prompt, logprobs=1, stop=" three")
    assert (choice["text"], choice["finish_reason"]) == ("one two", "stop")
    assert choice["logprobs"]["tokens"] == ["one", " two"]
    assert usage["completion_tokens"] == 4
    events = streamed(server, COMPLETIONS, prompt, logprobs=1, stop=" three")
    assert [token for event in events if event["logprobs"] for token in event["logprobs"]["tokens"]] == ["one", " two"]


def test_choices_of_n_have_their_own(server):
    answer = server.complete("hi", model="random", n=3, max_tokens=5, logprobs=1, temperature=1, seed=1)
    choices = strict(answer.body)["choices"]
    assert len({str(choice["logprobs"]["token_logprobs"]) for choice in choices}) == 3
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [5, 5, 5]


# --- echo -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["fake", "random"])
def test_a_prompt_is_scored_by_echo_and_max_tokens_0(server, model):
    prompt = "The quick brown fox jumps over the lazy dog. " * 4
    ids = server.post("/tokenize", {"content": prompt, "model": model}).json["tokens"]
    for sent in (prompt, ids):
        choice, usage = joined(server, COMPLETIONS, sent, model=model, echo=True, max_tokens=0, logprobs=2)
        its = choice["logprobs"]
        assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
        assert (len(its["tokens"]), usage["completion_tokens"]) == (len(ids), 0)
        assert its["token_logprobs"][0] is its["top_logprobs"][0] is None
        assert all(math.isfinite(value) for value in its["token_logprobs"][1:])
        for token, offset in zip(its["tokens"], its["text_offset"], strict=True):
            assert prompt[offset:].startswith(token)


@pytest.mark.parametrize("model", ["fake", "random"])
def test_an_echo_and_its_answer_are_one_text_with_one_list(server, model):
    wanted = {"model": model, "echo": True, "max_tokens": 4, "logprobs": 1, "temperature": 0}
    choice, usage = joined(server, COMPLETIONS, "Once upon", **wanted)
    its = choice["logprobs"]
    assert choice["text"].startswith("Once upon")
    assert len(its["tokens"]) == usage["prompt_tokens"] + 4
    assert its["text_offset"][usage["prompt_tokens"]] == len("Once upon")
    events = streamed(server, COMPLETIONS, "Once upon", **wanted)
    assert "".join(event["text"] for event in events) == choice["text"]
    parts = [one for event in events if event["logprobs"] for one in event["logprobs"]["token_logprobs"]]
    assert parts == nearly(its["token_logprobs"])


def test_a_long_echo_with_alternatives_is_complete(server):
    prompt = "x" * 6000
    choice, usage = joined(server, COMPLETIONS, prompt, echo=True, max_tokens=0, logprobs=5)
    assert len(choice["logprobs"]["tokens"]) == usage["prompt_tokens"] == 3000
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"] == prompt
    events = streamed(server, COMPLETIONS, prompt, echo=True, max_tokens=0, logprobs=5)
    assert "".join(event["text"] for event in events) == prompt
    assert sum(len(event["logprobs"]["tokens"]) for event in events if event["logprobs"]) == 3000


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"logprobs": 6}, "logprobs"),
        (COMPLETIONS, {"logprobs": -1}, "logprobs"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (CHAT, {"logprobs": 2}, "logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_out_of_range_is_refused_by_name(server, path, fields, param, stream):
    answer = server.begin("hi", path=path, stream=stream, **fields).answer()
    assert (answer.status, answer.error["param"]) == (400, param)


# --- the official client ----------------------------------------------------------------------------------------------


def test_the_sdk_reads_a_chats(client):
    wanted = {
        "model": "random", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "temperature": 0,
        "logprobs": True, "top_logprobs": 3,
    }  # fmt: skip
    answer = client.chat.completions.create(**wanted)
    content = answer.choices[0].logprobs.content
    assert [len(token.top_logprobs) for token in content] == [3] * 6
    assert all(token.top_logprobs[0].logprob == token.logprob for token in content)
    chunks = list(client.chat.completions.create(**wanted, stream=True))
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    again = [token for part in parts if part is not None for token in part.content]
    assert [token.bytes for token in again] == [token.bytes for token in content]
    assert [token.logprob for token in again] == pytest.approx([token.logprob for token in content], abs=1e-3)


def test_the_sdk_reads_a_completions(client):
    wanted = {"model": "random", "prompt": "Once", "max_tokens": 6, "temperature": 0, "logprobs": 2, "echo": True}
    its = client.completions.create(**wanted).choices[0].logprobs
    assert len(its.tokens) == len(its.token_logprobs) == len(its.text_offset) == len(its.top_logprobs) == 10
    assert its.token_logprobs[0] is None
    chunks = list(client.completions.create(**wanted, stream=True))
    again = [one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.tokens]
    assert again == its.tokens
