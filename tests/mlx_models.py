"""Writes MLX model directories from GGUF files, so that both backends run on the same weights.

For llamas with a byte-level vocabulary: the tiny models of ``tests/models.py`` and SmolLM2. Weights come out as f32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.models import scripted, tiny_random

_CONTROL = 3
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def mlx_tiny_random(folder: Path, **options: Any) -> Path:
    """``tiny_random`` as a directory; its GGUF stays beside it, with the ending ``.gguf``."""
    return mlx_directory(tiny_random(folder.with_suffix(".gguf"), **options), folder)


def mlx_scripted(folder: Path, chunks: list[bytes] | None = None) -> Path:
    """``scripted`` as a directory; its GGUF stays beside it, with the ending ``.gguf``."""
    return mlx_directory(scripted(folder.with_suffix(".gguf"), chunks), folder)


def mlx_directory(source: Path, folder: Path) -> Path:
    """Convert a GGUF file; quantized weights are widened."""
    reader = gguf.GGUFReader(source)
    values = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert values["general.architecture"] == "llama"
    folder.mkdir(parents=True)
    config = _config(values, tied=not any(tensor.name == "output.weight" for tensor in reader.tensors))
    save_file(_weights(reader, config), folder / "model.safetensors", metadata={"format": "mlx"})
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    _write_tokenizer(folder, values)
    return folder


def _config(values: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    heads, size = values["llama.attention.head_count"], values["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size,
        "num_hidden_layers": values["llama.block_count"],
        "intermediate_size": values["llama.feed_forward_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": values["llama.attention.head_count_kv"],
        "head_dim": values.get("llama.attention.key_length", size // heads),
        "rms_norm_eps": values["llama.attention.layer_norm_rms_epsilon"],
        "vocab_size": len(values["tokenizer.ggml.tokens"]),
        "rope_theta": values["llama.rope.freq_base"],
        "max_position_embeddings": values["llama.context_length"],
        "tie_word_embeddings": tied,
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "float32",
    }


def _weights(reader: gguf.GGUFReader, config: dict[str, Any]) -> dict[str, np.ndarray]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        stem = tensor.name.removesuffix(".weight")
        if stem.startswith("blk."):
            _, layer, part = stem.split(".")
            if part in heads:
                array = _unpermuted(array, heads[part])
            name = f"model.layers.{layer}.{_INNER[part]}"
        else:
            name = _OUTER[stem]
        weights[f"{name}.weight"] = np.ascontiguousarray(array)
    return weights


def _unpermuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """GGUF files hold the two halves of each rotary pair side by side; here they are half a head apart."""
    shape = rows.shape
    return rows.reshape(heads, shape[0] // heads // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def _write_tokenizer(folder: Path, values: dict[str, Any]) -> None:
    words = values["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in values["tokenizer.ggml.merges"]]
    vocabulary = {word: token for token, word in enumerate(words)}
    known = [(left, right) for left, right in merges if {left, right, left + right} <= vocabulary.keys()]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=known))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if values["tokenizer.ggml.pre"] == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    kinds = values["tokenizer.ggml.token_type"]
    control = [word for word, kind in zip(words, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": words[values["tokenizer.ggml.bos_token_id"]],
            "eos_token": words[values["tokenizer.ggml.eos_token_id"]],
            "add_bos_token": bool(values.get("tokenizer.ggml.add_bos_token", False)),
            "chat_template": values["tokenizer.chat_template"],
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value))
