"""What log probabilities look like over HTTP, whatever model they are of: the checks, and how they read an answer."""

from __future__ import annotations

import json
import math

import pytest

from tests.serving import CHAT, COMPLETIONS, ServerProcess


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


def check_legacy_layout(server: ServerProcess, model: str, count: int) -> None:
    """A completion has the legacy layout. ``count``: alternatives."""
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


def check_chats_layout(server: ServerProcess, model: str) -> None:
    """A chat has its own."""
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


def check_streamed_completion(server: ServerProcess, model: str) -> None:
    """A streamed completion says the same as a joined one, each event of its own text."""
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


def check_streamed_chat(server: ServerProcess, model: str) -> None:
    """A streamed chat says the same as a joined one."""
    wanted = {"model": model, "max_tokens": 10, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    choice, _ = joined(server, CHAT, "hi", **wanted)
    events = streamed(server, CHAT, "hi", **wanted)
    content = [token for event in events if event["logprobs"] for token in event["logprobs"]["content"]]
    assert content == nearly(choice["logprobs"]["content"])
    assert "".join(event["delta"].get("content", "") for event in events) == choice["message"]["content"]


def check_scored_prompt(server: ServerProcess, model: str) -> None:
    """A prompt, as text or as ids, is scored by ``echo`` and ``max_tokens: 0``."""
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


def check_echo_with_answer(server: ServerProcess, model: str) -> None:
    """An echo and its answer are one text with one list."""
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
