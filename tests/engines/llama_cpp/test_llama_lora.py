"""LoRA files: what they do to answers, and those that are refused, with the file's name, before llama.cpp reads them."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
import pytest

from slimproc.engines.backend import create
from slimproc.errors import LoadFailed
from slimproc.settings import LoraAdapter
from tests.engines.conformance import PROMPTS
from tests.models import lora, tiny_random

DOWN = "blk.0.ffn_down.weight"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    return lora(tmp_path_factory.mktemp("lora") / "adapter.gguf")


@pytest.fixture
def answers(open_engine):
    """What an engine with these adapters says to all prompts."""

    def ask(*adapters: LoraAdapter) -> list[str]:
        engine = open_engine(lora=adapters)
        return [engine.complete(prompt, 16).text for prompt in PROMPTS]

    return ask


def refusal(settings, adapter: Path, **changes) -> str:
    with pytest.raises(LoadFailed) as failure:
        create(settings(lora=(LoraAdapter(str(adapter)),), **changes)).load(lambda _fraction: None)
    assert failure.value.permanent
    assert "\n" not in failure.value.message
    assert adapter.name in failure.value.message
    return failure.value.message


def test_an_adapter_changes_what_is_said_and_the_same_again_after_a_restart(answers, adapter):
    plain = answers()
    adapted = answers(LoraAdapter(str(adapter)))
    assert adapted != plain
    assert answers(LoraAdapter(str(adapter))) == adapted


def test_a_scale_of_0_is_as_no_adapter_and_scales_differ_from_one_another(answers, adapter):
    said = [answers(LoraAdapter(str(adapter), scale)) for scale in (0.0, 0.3, 1.0, -1.0)]
    assert said[0] == answers()
    assert all(said[one] != said[other] for one in range(4) for other in range(one))


def test_what_two_adapters_take_back_from_each_other_is_as_none(answers, adapter):
    assert answers(LoraAdapter(str(adapter), 0.5), LoraAdapter(str(adapter), -0.5)) == answers()


def test_several_adapters_act_at_once(answers, adapter, tmp_path):
    other = lora(tmp_path / "other.gguf", {"blk.1.attn_q.weight": (64, 64)}, rank=2)
    both = answers(LoraAdapter(str(adapter)), LoraAdapter(str(other)))
    assert both not in (answers(LoraAdapter(str(adapter))), answers(LoraAdapter(str(other))), answers())


def test_an_adapter_says_exactly_what_its_formula_says(open_engine, models, tmp_path, adapter):
    """W + scale * alpha / rank * B A, put into the model's own weights, gives the same answers."""
    read = gguf.GGUFReader(adapter)
    a, b = (next(tensor.data for tensor in read.tensors if tensor.name.endswith(end)) for end in ("lora_a", "lora_b"))
    merged = tmp_path / "merged.gguf"
    merged.write_bytes((models / "tiny.gguf").read_bytes())
    weights = next(tensor for tensor in gguf.GGUFReader(merged, "r+").tensors if tensor.name == DOWN).data
    weights += 0.25 * 8.0 / 4 * (b.astype(np.float64) @ a.astype(np.float64)).astype(np.float32)
    weights.flush()
    adapted = open_engine(lora=(LoraAdapter(str(adapter), 0.25),))
    for prompt in PROMPTS:
        one, other = (engine.complete(prompt, 1, logprobs=3) for engine in (adapted, open_engine(merged)))
        values = [[value for _, value in generation.logprobs[0].top] for generation in (one, other)]
        assert values[0] == pytest.approx(values[1], abs=1e-3)


def test_the_details_name_it(open_engine, adapter):
    assert open_engine(lora=(LoraAdapter(str(adapter), 0.5),)).info.details["lora"] == "adapter.gguf x 0.5"
    assert open_engine().info.details["lora"] == "none"


def test_an_adapter_that_is_not_there_is_named(settings, tmp_path):
    assert "there is no file" in refusal(settings, tmp_path / "absent.gguf")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keys": {"general.type": "model"}}, "is no adapter: its general.type is 'model'"),
        ({"keys": {"general.type": None}}, "is no adapter"),
        ({"keys": {"general.type": 7}}, "is no adapter: its general.type is 7"),
        ({"keys": {"adapter.type": "control"}}, "is an adapter of another kind: 'control'"),
        ({"arch": "qwen2"}, "was made for a model of the kind 'qwen2', and this one is 'llama'"),
        ({"keys": {"adapter.lora.alpha": 8}}, "adapter.lora.alpha is 8"),
        ({"keys": {"adapter.lora.alpha": "8"}}, "adapter.lora.alpha is '8'"),
        ({"alpha": math.nan}, "adapter.lora.alpha is nan"),
        ({"keys": {"adapter.alora.invocation_tokens": [1, 2]}}, "aLoRA"),
        ({"pairs": {}}, "adapts no tensor"),
        ({"half": True}, f"has one half of what adapts {DOWN}"),
        ({"pairs": {"blk.7.ffn_down.weight": (128, 64)}}, "adapts blk.7.ffn_down.weight, which this model does not have"),
        ({"pairs": {DOWN: (64, 64)}}, f"for {DOWN}, which is 128 by 64, it has 64 by 4 and 4 by 64"),
        ({"pairs": {DOWN: (128, 63)}}, "does not fit this model"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_go_with_the_model_is_refused_before_llama_cpp_sees_it(
    settings, tmp_path, monkeypatch, options, words
):
    monkeypatch.setattr("slimproc.engines.llama_cpp.lora.lib.llama_adapter_lora_init", None)
    assert words in refusal(settings, lora(tmp_path / "adapter.gguf", **options))


def test_halves_that_do_not_meet_or_hold_integers_are_refused(settings, tmp_path):
    for change, words in (("rank", "does not fit this model"), ("kind", "is not f32, f16, bf16 or q8_0")):
        path = tmp_path / f"{change}.gguf"
        writer = gguf.GGUFWriter(str(path), "llama")
        writer.add_string("general.type", "adapter")
        writer.add_string("adapter.type", "lora")
        kind = np.int32 if change == "kind" else np.float32
        writer.add_tensor(f"{DOWN}.lora_a", np.zeros((4, 128), kind))
        writer.add_tensor(f"{DOWN}.lora_b", np.zeros((64, 4 if change == "kind" else 5), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        assert words in refusal(settings, path)


def test_a_broken_file_is_refused_at_every_length(settings, adapter, tmp_path):
    data = adapter.read_bytes()
    path = tmp_path / "cut.gguf"
    for length in range(0, len(data) - 1, 61):
        path.write_bytes(data[:length])
        refusal(settings, path)


def test_an_embedding_that_is_the_output_too_cannot_be_adapted(settings, open_engine, tmp_path):
    """llama.cpp would end the process; with an output of its own the model can have it."""
    path = lora(tmp_path / "embedding.gguf", {"token_embd.weight": (260, 64)}, turned=True)
    assert open_engine(lora=(LoraAdapter(str(path)),)).complete("hello", 4).failure is None
    tied = tiny_random(tmp_path / "tied.gguf", tied=True)
    assert open_engine(tied).complete("hello", 4).failure is None
    assert "uses for its output, too" in refusal(settings, path, path=tied)


@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_a_scale_that_is_no_number_is_refused(settings, adapter, scale):
    with pytest.raises(LoadFailed, match="its scale is"):
        create(settings(lora=(LoraAdapter(str(adapter), scale),))).load(lambda _fraction: None)
