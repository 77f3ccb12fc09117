"""What a loaded model's own numbers say against a request."""

from __future__ import annotations

import pytest

from slimproc.admission.fit import refusal
from slimproc.errors import ContextLengthExceeded
from slimproc.ipc.wire import ModelInfo
from slimproc.request import EmbedRequest, GenerateRequest


def model(*capabilities: str, size: int = 8) -> ModelInfo:
    return ModelInfo(context=10, slots=1, vocab_size=100, capabilities=capabilities, embedding_size=size)


GENERATE = GenerateRequest(id="r", model="m", prompts=["x"])
EMBED = EmbedRequest(id="r", model="m", prompts=["x"], names=["input"])
RANK = EmbedRequest(id="r", model="m", prompts=["x"], names=["documents[0]"], query="q")


@pytest.mark.parametrize("request_", [GENERATE, EMBED, RANK], ids=["generate", "embed", "rerank"])
@pytest.mark.parametrize("capability", ["generate", "embed", "rerank"])
def test_a_model_is_asked_only_for_what_it_can_do(request_, capability):
    error = refusal(request_, model(capability))
    if capability == request_.capability:
        assert error is None
    else:
        assert (error.status, error.param) == (400, "model")
    assert refusal(request_, model("generate", "embed", "rerank")) is None


@pytest.mark.parametrize(("dimensions", "fits"), [(None, True), (1, True), (8, True), (9, False)])
def test_vectors_are_cut_and_never_stretched(dimensions, fits):
    wanted = EmbedRequest(id="r", model="m", prompts=["x"], names=["input"], dimensions=dimensions)
    error = refusal(wanted, model("embed"))
    assert (error is None) == fits
    assert fits or error.param == "dimensions"


def test_token_ids_must_leave_room_for_an_answer_and_be_in_the_vocabulary():
    def of(*prompts: list[int]):
        return refusal(GenerateRequest(id="r", model="m", prompts=list(prompts)), model("generate"))

    assert of([1] * 9) is None
    assert isinstance(of([1], [1] * 10), ContextLengthExceeded)
    assert of([99]) is None
    assert of([1], [100]).param == "prompt"
