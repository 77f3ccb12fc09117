"""What the MLX backend generates: the same as llama.cpp on the same weights, and whole characters from cut ones."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest

from slimproc.request import Finish
from tests.engines.conformance import PROMPTS
from tests.models import HELLO, skip_without_llama_cpp


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_equal_those_of_llama_cpp_on_the_same_weights(open_mlx, random_model, prompt):
    skip_without_llama_cpp()
    ours = open_mlx(random_model)
    theirs = open_mlx(random_model.with_suffix(".gguf"), backend="llama_cpp")
    options = {"max_tokens": 60, "ignore_eos": True}
    assert ours.tokens(prompt) == theirs.tokens(prompt)
    assert ours.complete(prompt, **options).pieces == theirs.complete(prompt, **options).pieces


def test_penalties_and_biases_mean_what_they_mean_in_llama_cpp(open_mlx, random_model):
    skip_without_llama_cpp()
    engines = open_mlx(random_model), open_mlx(random_model.with_suffix(".gguf"), backend="llama_cpp")
    for options in (
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"logit_bias": {70: 4.0, 80: -100.0}, "repetition_penalty": 0.8, "frequency_penalty": 1.0},
    ):
        ours, theirs = (engine.complete(PROMPTS[2], 60, ignore_eos=True, **options) for engine in engines)
        assert ours.pieces == theirs.pieces


def test_characters_that_are_cut_across_tokens_come_out_whole(open_mlx, scripted_model):
    engine = open_mlx(scripted_model)
    answer = engine.complete("anything", 40)
    assert answer.pieces == [*HELLO, b""]
    assert (answer.text, answer.finish) == ("Hello there! café 🙂.", Finish.STOP)
    assert answer.usage.completion_tokens == len(HELLO)


def test_a_limit_in_the_middle_of_a_character_drops_it(open_mlx, scripted_model):
    answer = open_mlx(scripted_model).complete("anything", 5)
    assert (answer.text, answer.finish) == ("Hello there! caf", Finish.LENGTH)


def test_half_precision_weights_give_finite_tokens_too(open_mlx, random_model, tmp_path):
    half = tmp_path / "half"
    half.mkdir()
    for file in random_model.iterdir():
        (half / file.name).write_bytes(file.read_bytes())
    weights = {
        name: array.astype(mx.bfloat16) for name, array in mx.load(str(random_model / "model.safetensors")).items()
    }
    mx.save_safetensors(str(half / "model.safetensors"), weights, metadata={"format": "mlx"})
    engine = open_mlx(half)
    assert engine.info.details["dtype"] == "bfloat16"
    answers = [
        engine.submit(PROMPTS[0], 20, ignore_eos=True),
        engine.submit(PROMPTS[3], 20, temperature=1.0, top_p=0.9),
    ]
    engine.finish()
    assert [answer.failure for answer in answers] == [None, None]


def test_quantized_weights_run(open_mlx, random_model, tmp_path):
    import mlx_lm.utils  # noqa: PLC0415  # slow to import, and only wanted here

    folder = tmp_path / "quantized"
    folder.mkdir()
    for file in random_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    model, config = mlx_lm.utils.load_model(random_model)
    model, config = mlx_lm.utils.quantize_model(model, config, group_size=32, bits=8)
    mlx_lm.utils.save_model(folder, model)
    (folder / "config.json").write_text(json.dumps(config))
    engine = open_mlx(folder)
    assert engine.complete(PROMPTS[0], 10, ignore_eos=True).usage.completion_tokens == 10


def test_what_a_model_says_of_itself(open_mlx, scripted_model):
    info = open_mlx(scripted_model, context=None).info
    assert (info.context, info.slots, info.vocab_size) == (2048, 4, 265)
    assert (info.bos_token, info.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert info.control_tokens == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert "<|im_start|>" in info.chat_template
    assert info.details["dtype"] == "float32"
    assert info.details["size_bytes"] == 4 * info.details["parameters"]
    assert info.details["versions"].startswith("mlx ")
    assert info.details["blas"]
