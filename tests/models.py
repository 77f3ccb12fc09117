"""Writes small GGUF models at test time: a random one, one that always says the same, and broken ones.

Byte-level vocabulary: id 3 + b is the byte b, ids 0 to 2 are control tokens. Needs gguf and numpy only; 0.02 s each.
"""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BOS, EOS = 1, 2
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HELLO = [b"Hello", b" there", b"!", b" caf", b"\xc3", b"\xa9", b" ", b"\xf0\x9f", b"\x99\x82", b"."]
"""A script whose characters are cut across tokens."""


def tiny_random(
    path: Path, *, size: int = 64, layers: int = 2, context: int = 2048, seed: int = 0, bos: bool = False
) -> Path:
    """A llama with random weights: arbitrary bytes, hardly ever an end. ``bos``: its tokenizer adds one.

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
    shape = _Shape(size, layers, heads, kv_heads, width, hidden, context)
    return _write(path, "tiny-random", shape, words, tensors, bos=bos)


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
    path: Path, name: str, shape: _Shape, words: list[str], tensors: dict[str, np.ndarray], *, bos: bool = False
) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
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
    return path


def _spelled(data: bytes) -> str:
    """The visible characters by which byte-level vocabularies write bytes (GPT-2's table)."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return "".join(chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in data)


# --- broken files -------------------------------------------------------------------------------------------------


def aborts_in_load(path: Path, good: Path) -> Path:
    """A file on which llama.cpp ends the process while it loads (an assertion on the number of layers)."""
    return _with_value(path, good, "llama.block_count", struct.pack("<I", 0))


def aborts_in_first_step(path: Path, good: Path) -> Path:
    """A file that loads, and on which llama.cpp ends the process in the first step (an assertion on epsilon)."""
    return _with_value(path, good, "llama.attention.layer_norm_rms_epsilon", struct.pack("<f", -1.0))


def with_nan_weights(path: Path, good: Path) -> Path:
    """A file that loads and whose every logit is NaN."""
    data = bytearray(good.read_bytes())
    begin = gguf.GGUFReader(good).data_offset
    data[begin:] = struct.pack("<f", float("nan")) * ((len(data) - begin) // 4)
    path.write_bytes(data)
    return path


def _with_value(path: Path, good: Path, key: str, value: bytes) -> Path:
    data = bytearray(good.read_bytes())
    at = gguf.GGUFReader(good).fields[key].offset + 8 + len(key) + 4
    data[at : at + len(value)] = value
    path.write_bytes(data)
    return path


def broken_files(good: Path) -> dict[str, bytes]:
    """Contents of files that are no models, or parts of one, by what is wrong with each."""
    data = good.read_bytes()
    reader = gguf.GGUFReader(good)
    first = reader.tensors[0].field.offset
    dimensions = first + 8 + len(reader.tensors[0].name)
    kind = dimensions + 4 + 8 * len(reader.tensors[0].shape)
    words = reader.fields["tokenizer.ggml.tokens"].offset + 8 + len("tokenizer.ggml.tokens") + 4
    layers = reader.fields["llama.block_count"].offset + 8 + len("llama.block_count")

    def put(at: int, code: str, *values: int) -> bytes:
        changed = bytearray(data)
        struct.pack_into(code, changed, at, *values)
        return bytes(changed)

    def key(name: str, value: int) -> bytes:
        return put(reader.fields[name].offset + 8 + len(name) + 4, "<I", value)

    middle = reader.data_offset + (len(data) - reader.data_offset) // 2
    return {
        "empty": b"",
        "three bytes": data[:3],
        "wrong magic": b"GGML" + data[4:],
        "zeros": bytes(1 << 16),
        "random bytes": np.random.default_rng(0).bytes(1 << 16),
        "web page": b"<!DOCTYPE html><html>404</html>" * 50,
        "LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 98362432\n",
        "version 1": put(4, "<I", 1),
        "version 99": put(4, "<I", 99),
        "big endian": put(4, ">I", 3),
        "cut in the header": data[:20],
        "cut in the keys": data[:300],
        "cut in the tensor list": data[: first + 40],
        "cut in the middle": data[:middle],
        "last 32 bytes missing": data[:-32],
        "2^63 tensors": put(8, "<Q", 1 << 63),
        "2^31 tensors": put(8, "<Q", 1 << 31),
        "no tensors": put(8, "<Q", 0),
        "one tensor too many": put(8, "<Q", len(reader.tensors) + 1),
        "2^40 keys": put(16, "<Q", 1 << 40),
        "no keys": put(16, "<Q", 0),
        "key of 2^62 bytes": put(24, "<Q", 1 << 62),
        "key of 4 GiB": put(24, "<Q", 1 << 32),
        "array of 2^60": put(words + 4, "<Q", 1 << 60),
        "array of 2^33": put(words + 4, "<Q", 1 << 33),
        "100 dimensions": put(dimensions, "<I", 100),
        "dimension 2^62": put(dimensions + 4, "<Q", 1 << 62),
        "dimension 0": put(dimensions + 4, "<Q", 0),
        "dimension -1": put(dimensions + 4, "<Q", (1 << 64) - 1),
        "tensor type 999": put(kind, "<I", 999),
        "tensor type Q4_0": put(kind, "<I", 2),
        "removed tensor type": put(kind, "<I", 4),
        "tensor offset 2^62": put(kind + 4, "<Q", 1 << 62),
        "two tensors of one name": data.replace(b"blk.0.attn_q.weight", b"blk.0.attn_k.weight", 1),
        "unknown key type": put(layers, "<I", 77),
        "3 layers, 2 present": key("llama.block_count", 3),
        "0 heads": key("llama.attention.head_count", 0),
        "3 heads": key("llama.attention.head_count", 3),
        "0 KV heads": key("llama.attention.head_count_kv", 0),
        "8 KV heads": key("llama.attention.head_count_kv", 8),
        "0 wide": key("llama.embedding_length", 0),
        "63 wide": key("llama.embedding_length", 63),
        "0 rope dimensions": key("llama.rope.dimension_count", 0),
        "unknown architecture": data.replace(b"llama", b"lxama"),
        "unknown tokenizer": data.replace(b"gpt2", b"xpt2", 1),
        "unknown pre-tokenizer": data.replace(b"gpt-2", b"xpt-2", 1),
        "no merges": data.replace(b"tokenizer.ggml.merges", b"tokenizer.ggml.mergez", 1),
        "no vocabulary": data.replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz", 1),
    }
