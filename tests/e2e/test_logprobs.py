"""Log probabilities through the whole server: both routes, streamed and joined, with the fake and with tiny models."""

from __future__ import annotations

import json

import openai
import pytest

from tests import models
from tests.e2e import logprob_layouts as layouts
from tests.e2e.logprob_layouts import joined, streamed, strict
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


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["fake", "random", "hello"])
@pytest.mark.parametrize("count", [0, 3, 5])
def test_a_completion_has_the_legacy_layout(server, model, count):
    layouts.check_legacy_layout(server, model, count)


@pytest.mark.parametrize("model", ["fake", "random", "hello"])
def test_a_chat_has_its_own_layout(server, model):
    layouts.check_chats_layout(server, model)


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
    layouts.check_streamed_completion(server, model)


@pytest.mark.parametrize("model", ["fake", "random", "hello"])
def test_a_streamed_chat_says_the_same_as_a_joined_one(server, model):
    layouts.check_streamed_chat(server, model)


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
    layouts.check_scored_prompt(server, model)


@pytest.mark.parametrize("model", ["fake", "random"])
def test_an_echo_and_its_answer_are_one_text_with_one_list(server, model):
    layouts.check_echo_with_answer(server, model)


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
