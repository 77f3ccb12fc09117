"""The keys that only llama.cpp's engines take."""

import pytest

from slimproc.settings import LoraAdapter


def test_they_reach_the_engine(load, tmp_path):
    text = (
        "models: {m: {backend: llama_cpp, path: /m.gguf, kv_type: q8_0, mmap: false, speculation: 16, flash_attention: true, "
        "lora: [a.gguf, {path: 'package:p/b.gguf', scale: 0.5}, {path: ~/c.gguf, scale: -1}]}}"
    )
    settings = load(text).models["m"].engine_settings()
    assert (settings.kv_type, settings.mmap, settings.speculation, settings.flash_attention) == (
        "q8_0",
        False,
        16,
        True,
    )
    assert settings.lora == (
        LoraAdapter(f"{tmp_path}/a.gguf"),
        LoraAdapter("package:p/b.gguf", 0.5),
        LoraAdapter(f"{tmp_path}/home/c.gguf", -1.0),
    )


def test_without_them_an_engine_has_its_own_defaults(load):
    settings = load("models: {m: {backend: llama_cpp, path: /m.gguf}}").models["m"].engine_settings()
    plain = type(settings)(model="m", backend="llama_cpp", path="/m.gguf")
    assert settings == plain


@pytest.mark.parametrize(
    "key", ["lora: [x]", "kv_type: q8_0", "flash_attention: false", "mmap: false", "speculation: 4"]
)
@pytest.mark.parametrize("backend", ["fake", "mlx, path: /x"])
def test_another_backend_refuses_them_by_name(problems, key, backend):
    (line,) = problems(f"models: {{m: {{backend: {backend}, {key}}}}}")
    name = key.partition(":")[0]
    assert line.startswith(f"slimproc.yaml:1: models.m.{name}: only llama_cpp takes it, and this model's backend is ")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("kv_type: q8_0, flash_attention: false", "kv_type: q8_0 needs flash_attention: true"),
        ("kv_type: q5_0", "kv_type: wanted one of f16, q8_0, q4_0, not 'q5_0'"),
        ("speculation: 17", "speculation: wanted an integer from 0 to 16, not 17"),
        ("speculation: true", "speculation: wanted an integer from 0 to 16, not true"),
        ("mmap: 1", "mmap: wanted true or false, not 1"),
        ("lora: x.gguf", "lora: wanted a list of paths, or of {path, scale}, not 'x.gguf'"),
        ("lora: [{scale: 1}]", "lora: item 1: wanted a path, not nothing"),
        ("lora: [{path: x, scael: 1}]", "lora: item 1: unknown setting 'scael': an adapter has path and scale"),
        ("lora: [x, {path: x, scale: '1'}]", "lora: item 2: wanted a scale from -1000 to 1000, not '1'"),
        ("lora: [{path: x, scale: 1e999}]", "lora: item 1: wanted a scale from -1000 to 1000, not inf"),
        ("lora: [7]", "lora: item 1: wanted text, not 7: quote it"),
        ("lora: [[x]]", "lora: item 1: wanted a path, not a list"),
    ],
)
def test_a_wrong_one_is_named(problems, keys, message):
    (line,) = problems(f"models: {{m: {{backend: llama_cpp, path: /x, {keys}}}}}")
    assert line.startswith(f"slimproc.yaml:1: models.m.{message}")


def test_without_flash_attention_the_context_is_kept_as_f16(load):
    text = "models: {m: {backend: llama_cpp, path: /x, flash_attention: false, kv_type: f16}}"
    assert load(text).models["m"].flash_attention is False
