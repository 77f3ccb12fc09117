"""The settings of a llama.cpp engine through the whole server: what they do to answers, and how a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import models
from tests.serving import wait_until


@pytest.fixture(scope="module")
def random_model(tmp_path_factory) -> Path:
    return models.tiny_random(tmp_path_factory.mktemp("models") / "tiny.gguf")


def tiny(path: Path, **settings) -> dict:
    return {"models": {"tiny": {"backend": "llama_cpp", "path": str(path), "threads": 1, **settings}}}


def test_guessing_ahead_changes_no_answer_streamed_or_joined(serve, tmp_path):
    path = models.scripted(tmp_path / "scripted.gguf")
    said = "".join(chunk.decode("latin-1") for chunk in models.HELLO)
    wanted = {"temperature": 0, "max_tokens": 90, "ignore_eos": True, "logit_bias": {"2": -100}}
    plain = serve(tiny(path)).complete(said, **wanted).json
    server = serve(tiny(path, speculation=8))
    assert server.replica()["details"]["speculation"] == 8

    joined = server.complete(said, **wanted).json
    with server.stream(said, **wanted, stream_options={"include_usage": True}) as reader:
        events = [event for event in reader.events() if event != "[DONE]"]

    assert joined["choices"][0] == plain["choices"][0]
    assert joined["usage"]["completion_tokens"] == 90
    texts = [event["choices"][0]["text"] for event in events if event["choices"]]
    assert "".join(texts) == plain["choices"][0]["text"]
    assert events[-1]["usage"]["completion_tokens"] == 90
    assert len(texts) < 60, "tokens that were guessed come out together"
    stop = plain["choices"][0]["text"][40:44]
    stopped = server.complete(said, **wanted, stop=stop)
    assert stopped.text == plain["choices"][0]["text"].partition(stop)[0]


def test_an_adapter_is_in_force_and_named(serve, tmp_path, random_model):
    models.lora(tmp_path / "style.gguf")
    wanted = {"temperature": 0, "max_tokens": 20}
    plain = serve(tiny(random_model)).complete("abc", **wanted).text
    server = serve(tiny(random_model, lora=[{"path": str(tmp_path / "style.gguf"), "scale": 0.5}]))

    assert server.complete("abc", **wanted).text != plain
    assert server.replica()["details"]["lora"] == "style.gguf x 0.5"


def test_an_adapter_for_another_model_fails_readiness_by_its_name(serve, tmp_path, random_model):
    path = models.lora(tmp_path / "other.gguf", {"blk.0.ffn_down.weight": (64, 64)})
    server = serve(tiny(random_model, lora=[str(path)]), wait=False)

    told = wait_until(
        lambda: (model := server.get("/readyz").json["models"]["tiny"]).get("reason") and model, "a cause is told"
    )

    assert "other.gguf does not fit this model" in told["reason"]
    assert server.get("/healthz").status == 200
