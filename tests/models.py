"""Writes small GGUF models at test time: a random one, one that always says the same, and broken ones.

Byte-level vocabulary: id 3 + b is the byte b, ids 0 to 2 are control tokens. Needs gguf and numpy only; 0.02 s each.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BOS, EOS = 1, 2
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HELLO = [b"Hello", b" there", b"!", b" caf", b"\xc3", b"\xa9", b" ", b"\xf0\x9f", b"\x99\x82", b"."]
"""A script whose characters are cut across tokens."""


def tiny_random(
    path: Path,
    *,
    size: int = 64,
    layers: int = 2,
    context: int = 2048,
    seed: int = 0,
    bos: bool = False,
    tied: bool = False,
    shards: int = 1,
) -> Path:
    """A llama with random weights: arbitrary bytes, hardly ever an end. ``bos``: its tokenizer adds one; ``tied``: its
    embedding is its output, too. ``shards``: files that it is split into; the first one's path is returned.

    Raise ``size`` and ``layers`` for a slower one (512 and 12: 112 MB, some hundred tokens a second).
    """
    words = [*CONTROL, *(_spelled(bytes([byte])) for byte in range(256)), "Ġt"]
    heads, kv_heads, width, hidden = 4, 2, size // 4, 2 * size
    random = np.random.default_rng(seed)

    def weights(*shape: int, scale: float) -> np.ndarray:
        return (random.standard_normal(shape) * scale).astype(np.float32)

    tensors = {
        "token_embd": weights(len(words), size, scale=1.0),
        "output_norm": np.ones(size, np.float32),
        "output": weights(len(words), size, scale=0.3),
    }
    for layer in range(layers):
        tensors |= {
            f"blk.{layer}.attn_norm": np.ones(size, np.float32),
            f"blk.{layer}.ffn_norm": np.ones(size, np.float32),
            f"blk.{layer}.attn_q": weights(heads * width, size, scale=0.1),
            f"blk.{layer}.attn_k": weights(kv_heads * width, size, scale=0.1),
            f"blk.{layer}.attn_v": weights(kv_heads * width, size, scale=0.1),
            f"blk.{layer}.attn_output": weights(size, heads * width, scale=0.1),
            f"blk.{layer}.ffn_gate": weights(hidden, size, scale=0.1),
            f"blk.{layer}.ffn_up": weights(hidden, size, scale=0.1),
            f"blk.{layer}.ffn_down": weights(size, hidden, scale=0.1),
        }
    if tied:
        del tensors["output"]
    shape = _Shape(size, layers, heads, kv_heads, width, hidden, context)
    return _write(path, "tiny-random", shape, words, tensors, bos=bos, shards=shards)


def lora(
    path: Path,
    pairs: dict[str, tuple[int, int]] | None = None,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    arch: str = "llama",
    keys: dict[str, object] | None = None,
    half: bool = False,
    turned: bool = False,
) -> Path:
    """A LoRA adapter with random weights. ``pairs``: what it adapts, with the tensor's sizes (in, out); without any,
    it is one for ``tiny_random`` as it comes. ``keys`` replaces keys, or leaves one out (None); ``half``: no second halves;
    ``turned``: sizes the other way round, as for an embedding.
    """
    random = np.random.default_rng(11)
    writer = gguf.GGUFWriter(str(path), arch)
    described = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": alpha, **(keys or {})}
    for key, value in described.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    for name, (into, out) in ({"blk.0.ffn_down.weight": (128, 64)} if pairs is None else pairs).items():
        first = random.standard_normal((rank, into)).astype(np.float32)
        writer.add_tensor(f"{name}.lora_a", np.ascontiguousarray(first.T) if turned else first)
        if not half:
            writer.add_tensor(f"{name}.lora_b", random.standard_normal((out, rank)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def scripted(path: Path, chunks: list[bytes] | None = None, *, context: int = 2048, least_size: int = 0) -> Path:
    """A model that answers any prompt with ``chunks``, each one token, and then ends. Chunks must all be different.

    Its hidden state is the last token, one-hot, and its output matrix says which token comes after which. At
    temperature 1 each step goes as scripted with p = 0.998. ``least_size``: values that the hidden state has at least.
    """
    words = [*CONTROL, *(_spelled(bytes([byte])) for byte in range(256)), "Ġt"]
    script = []
    for chunk in HELLO if chunks is None else chunks:
        word = _spelled(chunk)
        if word not in words:
            words.append(word)
        script.append(words.index(word))
    assert len(set(script)) == len(script), "each token has one successor, so no chunk may come twice"
    size = -(-max(len(words), least_size) // 64) * 64
    successor = [script[0]] * len(words)
    for token, after in zip(script, [*script[1:], EOS], strict=True):
        successor[token] = after
    successor[EOS] = EOS
    output = np.zeros((len(words), size), np.float32)
    output[successor, np.arange(len(words))] = 12 / np.sqrt(size)  # the norm makes a one-hot vector sqrt(size) long
    width, hidden = 16, 32
    tensors = {
        "token_embd": np.eye(len(words), size, dtype=np.float32),
        "output_norm": np.ones(size, np.float32),
        "output": output,
        "blk.0.attn_norm": np.ones(size, np.float32),
        "blk.0.ffn_norm": np.ones(size, np.float32),
        **{f"blk.0.attn_{name}": np.zeros((width, size), np.float32) for name in "qkv"},
        "blk.0.attn_output": np.zeros((size, width), np.float32),
        "blk.0.ffn_gate": np.zeros((hidden, size), np.float32),
        "blk.0.ffn_up": np.zeros((hidden, size), np.float32),
        "blk.0.ffn_down": np.zeros((size, hidden), np.float32),
    }
    return _write(path, "scripted", _Shape(size, 1, 1, 1, width, hidden, context), words, tensors)


class _Shape:
    def __init__(
        self, size: int, layers: int, heads: int, kv_heads: int, width: int, hidden: int, context: int
    ) -> None:
        self.size, self.layers, self.heads, self.kv_heads = size, layers, heads, kv_heads
        self.width, self.hidden, self.context = width, hidden, context


def _write(
    path: Path,
    name: str,
    shape: _Shape,
    words: list[str],
    tensors: dict[str, np.ndarray],
    *,
    bos: bool = False,
    shards: int = 1,
) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama", split_max_tensors=-(-len(tensors) // shards) if shards > 1 else 0)
    writer.add_name(name)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.size)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.width)
    writer.add_key_length(shape.width)
    writer.add_value_length(shape.width)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(words))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    writer.add_token_types([control] * len(CONTROL) + [normal] * (len(words) - len(CONTROL)))
    writer.add_token_merges(["Ġ t"])  # llama.cpp refuses a byte-level vocabulary without any merge
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(bos)
    writer.add_chat_template(CHATML)
    for key, tensor in tensors.items():
        writer.add_tensor(f"{key}.weight", np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_name(f"{path.stem}-00001-of-{shards:05}.gguf") if shards > 1 else path


def _spelled(data: bytes) -> str:
    """The visible characters by which byte-level vocabularies write bytes (GPT-2's table)."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return "".join(chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in data)


def skip_without_llama_cpp() -> None:
    """Looks for the package and does not import it: that would turn llama.cpp's log to its own, for all later tests."""
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed: pip install -e '.[llama]'")
