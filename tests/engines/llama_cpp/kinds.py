"""Tiny models of kinds that ``tests.models`` does not write: recurrent, with a table of positions, with SentencePiece."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

from tests.models import CONTROL, _spelled


def recurrent(path: Path, *, size: int = 64, context: int = 2048) -> Path:
    """A Mamba with random weights and the vocabulary of ``tests.models``: its state cannot be taken back."""
    words = [*CONTROL, *(_spelled(bytes([byte])) for byte in range(256)), "Ġt"]
    inner, state, kernel, rank = 2 * size, 8, 4, 4
    random = np.random.default_rng(5)

    def weights(*shape: int, scale: float = 0.1) -> np.ndarray:
        return (random.standard_normal(shape) * scale).astype(np.float32)

    tensors = {
        "token_embd.weight": weights(len(words), size, scale=1.0),
        "output_norm.weight": np.ones(size, np.float32),
        "output.weight": weights(len(words), size, scale=0.3),
        "blk.0.attn_norm.weight": np.ones(size, np.float32),
        "blk.0.ssm_in.weight": weights(2 * inner, size),
        "blk.0.ssm_conv1d.weight": weights(inner, kernel, scale=0.3),
        "blk.0.ssm_conv1d.bias": np.zeros(inner, np.float32),
        "blk.0.ssm_x.weight": weights(rank + 2 * state, inner),
        "blk.0.ssm_dt.weight": weights(inner, rank),
        "blk.0.ssm_dt.bias": np.ones(inner, np.float32),
        "blk.0.ssm_a": -np.ones((inner, state), np.float32),
        "blk.0.ssm_d": np.ones(inner, np.float32),
        "blk.0.ssm_out.weight": weights(size, inner),
    }
    writer = gguf.GGUFWriter(str(path), "mamba")
    writer.add_context_length(context)
    writer.add_embedding_length(size)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(1)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    writer.add_layer_norm_rms_eps(1e-5)
    _add_byte_vocabulary(writer, words)
    return _finish(writer, tensors)


def with_positions(path: Path, *, context: int = 16) -> Path:
    """A GPT-2 with random weights: it has a row for each of the ``context`` positions that it was trained for."""
    words = [*CONTROL, *(_spelled(bytes([byte])) for byte in range(256)), "Ġt"]
    size, hidden = 32, 64
    random = np.random.default_rng(6)

    def weights(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) * 0.3).astype(np.float32)

    shapes = {
        "attn_norm": (size,), "attn_qkv": (3 * size, size), "attn_output": (size, size),
        "ffn_norm": (size,), "ffn_up": (hidden, size), "ffn_down": (size, hidden),
    }  # fmt: skip
    tensors = {
        "token_embd.weight": weights(len(words), size),
        "position_embd.weight": weights(context, size),
        "output_norm.weight": weights(size),
        "output_norm.bias": weights(size),
    }
    for name, shape in shapes.items():
        tensors |= {f"blk.0.{name}.weight": weights(*shape), f"blk.0.{name}.bias": weights(shape[0])}
    writer = gguf.GGUFWriter(str(path), "gpt2")
    writer.add_context_length(context)
    writer.add_embedding_length(size)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(2)
    writer.add_block_count(1)
    writer.add_layer_norm_eps(1e-5)
    _add_byte_vocabulary(writer, words)
    return _finish(writer, tensors)


def byte_level(path: Path, pre: str, *, words: Sequence[str] = (), merges: Sequence[str] = ("Ġ t",)) -> Path:
    """A llama of zeros with the vocabulary of ``tests.models``, ``words`` behind it, and the pre-tokenizer ``pre``."""
    every = [*CONTROL, *(_spelled(bytes([byte])) for byte in range(256)), "Ġt", *words]
    writer = gguf.GGUFWriter(str(path), "llama")
    tensors = _zeros(writer, len(every))
    _add_byte_vocabulary(writer, every, pre=pre, merges=merges)
    return _finish(writer, tensors)


def by_threes(path: Path) -> Path:
    """Its vocabulary groups digits by three from the right, and has a token for each two and three of them."""
    pairs = [f"{number:02}" for number in range(100)]
    threes = [f"{number:03}" for number in range(1000)]
    merges = [f"{pair[0]} {pair[1]}" for pair in pairs] + [f"{three[:2]} {three[2]}" for three in threes]
    return byte_level(path, "superbpe", words=[*pairs, *threes], merges=merges)


SPM_WORDS = ["▁", *"abcdehilmnorstuwy", "<", ">", "|", "_", "▁h", "▁hi", "▁n", "ow", "▁now", "\n\n", "\nx", "x"]
"""Words of ``sentencepiece``; its other characters are bytes."""


def sentencepiece(path: Path, *, byte_tokens: range = range(256)) -> Path:
    """A llama of zeros whose vocabulary is SentencePiece's: a text, and what comes after a control token, begins with a
    space that is not its own. ``byte_tokens``: bytes that have a token.
    """
    words = [*CONTROL, "<unk>", *(f"<0x{byte:02X}>" for byte in byte_tokens), *SPM_WORDS]
    kinds = gguf.TokenType
    types = [kinds.CONTROL] * 3 + [kinds.UNKNOWN] + [kinds.BYTE] * len(byte_tokens) + [kinds.NORMAL] * len(SPM_WORDS)
    writer = gguf.GGUFWriter(str(path), "llama")
    tensors = _zeros(writer, len(words))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([float(-place) for place in range(len(words))])
    writer.add_token_types([int(kind) for kind in types])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    return _finish(writer, tensors)


def _zeros(writer: gguf.GGUFWriter, words: int) -> dict[str, np.ndarray]:
    """The sizes and the weights of a llama of zeros."""
    size, hidden = 32, 32
    writer.add_context_length(2048)
    writer.add_embedding_length(size)
    writer.add_block_count(1)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(size)
    return {
        "token_embd.weight": np.ones((words, size), np.float32),
        "output_norm.weight": np.ones(size, np.float32),
        "blk.0.attn_norm.weight": np.ones(size, np.float32),
        "blk.0.ffn_norm.weight": np.ones(size, np.float32),
        **{f"blk.0.attn_{name}.weight": np.zeros((size, size), np.float32) for name in ("q", "k", "v", "output")},
        "blk.0.ffn_gate.weight": np.zeros((hidden, size), np.float32),
        "blk.0.ffn_up.weight": np.zeros((hidden, size), np.float32),
        "blk.0.ffn_down.weight": np.zeros((size, hidden), np.float32),
    }


def _add_byte_vocabulary(
    writer: gguf.GGUFWriter, words: list[str], *, pre: str = "gpt-2", merges: Sequence[str] = ("Ġ t",)
) -> None:
    control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(words)
    writer.add_token_types([control] * len(CONTROL) + [normal] * (len(words) - len(CONTROL)))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _finish(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> Path:
    for key, tensor in tensors.items():
        writer.add_tensor(key, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(writer.path)
