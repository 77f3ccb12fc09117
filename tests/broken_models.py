"""Model files that are broken, each in its own way, made from a good one; and those that take the process along."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np

_NAN = struct.pack("<f", float("nan"))

_LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 98362432\n"


def aborts_in_load(path: Path, good: Path) -> Path:
    """A file on which llama.cpp ends the process while it loads (an assertion: no word is in a vocabulary twice)."""
    path.write_bytes(broken_files(good)["two words alike"])
    return path


def aborts_in_first_step(path: Path, good: Path) -> Path:
    """A file that loads, and on which llama.cpp ends the process in the first step: it cannot multiply by integers."""
    path.write_bytes(broken_files(good)["norm of integers"])
    return path


def with_nan_weights(path: Path, good: Path) -> Path:
    """A file that loads and whose every logit is NaN."""
    path.write_bytes(broken_files(good)["weights of NaN"])
    return path


def with_a_token_of_nan(path: Path, good: Path, *tokens: int) -> Path:
    """A file whose model serves until one of ``tokens`` is in a prompt: then all values from there on are NaN."""
    data = bytearray(good.read_bytes())
    table = next(tensor for tensor in gguf.GGUFReader(good).tensors if tensor.name == "token_embd.weight")
    width = int(table.shape[0])
    for token in tokens:
        at = int(table.data_offset) + 4 * width * token
        data[at : at + 4 * width] = _NAN * width
    path.write_bytes(data)
    return path


def without_vocabulary(path: Path, good: Path) -> Path:
    """A file that says that its model has no vocabulary, and how many tokens that would have."""
    reader = gguf.GGUFReader(good)
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, field in reader.fields.items():
        if name.startswith("llama."):
            writer.add_key_value(name, field.contents(), field.types[0])
    writer.add_tokenizer_model("no_vocab")
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def lfs_download(folder: Path) -> Path:
    """What git leaves of a model when Git LFS is not installed."""
    path = folder / "pointer.gguf"
    path.write_bytes(_LFS_POINTER)
    return path


def broken_files(good: Path) -> dict[str, bytes]:
    """Contents of files that are no models, or parts of one, by what is wrong with each."""
    data = good.read_bytes()
    reader = gguf.GGUFReader(good)
    first = reader.tensors[0].field.offset
    dimensions = first + 8 + len(reader.tensors[0].name)
    kind = dimensions + 4 + 8 * len(reader.tensors[0].shape)
    words = reader.fields["tokenizer.ggml.tokens"].offset + 8 + len("tokenizer.ggml.tokens") + 4
    token_list = reader.fields["tokenizer.ggml.tokens"]
    letter = next(place for place in token_list.data if bytes(token_list.parts[place]) == b"a")
    letter_at = token_list.offset + sum(part.nbytes for part in token_list.parts[:letter])
    norm = next(tensor for tensor in reader.tensors if tensor.name == "blk.0.attn_norm.weight")
    norm_kind = norm.field.offset + 8 + len(norm.name) + 4 + 8 * len(norm.shape)
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
        "text": b"Entry not found",
        "JSON": b'{"error": "Repository not found"}',
        "web page": b"<!DOCTYPE html><html>404</html>" * 50,
        "LFS pointer": _LFS_POINTER,
        "git-annex pointer": b"/annex/objects/SHA256E-s98362432--" + b"0" * 64 + b".gguf\n",
        "safetensors": struct.pack("<Q", 64) + b'{"__metadata__":{"format":"pt"}}'.ljust(64) + bytes(256),
        "PyTorch": b"PK\x03\x04" + bytes(256),
        "gzip": b"\x1f\x8b\x08" + bytes(256),
        "ggjt": b"tjgg" + bytes(256),
        "version 1": put(4, "<I", 1),
        "version 99": put(4, "<I", 99),
        "big endian": put(4, ">I", 3),
        "cut in the header": data[:20],
        "cut in the keys": data[:300],
        "cut in the tensor list": data[: first + 40],
        "cut in the middle": data[:middle],
        "last 32 bytes missing": data[:-32],
        "2^63 tensors": put(8, "<Q", 1 << 63),
        "2^40 tensors": put(8, "<Q", 1 << 40),
        "2^31 tensors": put(8, "<Q", 1 << 31),
        "no tensors": put(8, "<Q", 0),
        "one tensor too many": put(8, "<Q", len(reader.tensors) + 1),
        "2^63 keys": put(16, "<Q", 1 << 63),
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
        "tensor offset + 8": put(kind + 4, "<Q", struct.unpack_from("<Q", data, kind + 4)[0] + 8),
        "norm of integers": put(norm_kind, "<I", int(gguf.GGMLQuantizationType.I32)),
        "two words alike": put(letter_at, "<B", ord("b")),
        "two tensors of one name": data.replace(b"blk.0.attn_q.weight", b"blk.0.attn_k.weight", 1),
        "unknown key type": put(layers, "<I", 77),
        "0 layers": key("llama.block_count", 0),
        "513 layers": key("llama.block_count", 513),
        "100,000 layers": key("llama.block_count", 100_000),
        "3 layers, 2 present": key("llama.block_count", 3),
        "0 heads": key("llama.attention.head_count", 0),
        "3 heads": key("llama.attention.head_count", 3),
        "0 KV heads": key("llama.attention.head_count_kv", 0),
        "3 KV heads": key("llama.attention.head_count_kv", 3),
        "8 KV heads": key("llama.attention.head_count_kv", 8),
        "0 wide": key("llama.embedding_length", 0),
        "63 wide": key("llama.embedding_length", 63),
        "0 rope dimensions": key("llama.rope.dimension_count", 0),
        "7 rope dimensions": key("llama.rope.dimension_count", 7),
        "0 tokens of context": key("llama.context_length", 0),
        "5 tokens of vocabulary": key("llama.vocab_size", 5),
        "2^31 tokens of vocabulary": key("llama.vocab_size", 1 << 31),
        "unknown BOS": key("tokenizer.ggml.bos_token_id", 99_999),
        "unknown EOS": key("tokenizer.ggml.eos_token_id", 99_999),
        "epsilon of NaN": key("llama.attention.layer_norm_rms_epsilon", 0x7FC00000),
        "infinite epsilon": key("llama.attention.layer_norm_rms_epsilon", 0x7F800000),
        "epsilon of -1": key("llama.attention.layer_norm_rms_epsilon", 0xBF800000),
        "weights of NaN": data[: reader.data_offset] + _NAN * ((len(data) - reader.data_offset) // 4),
        "weights of random bytes": data[: reader.data_offset]
        + np.random.default_rng(1).bytes(len(data) - reader.data_offset),
        "template that cannot be parsed": data.replace(b"{% for message", b"{% fxx message", 1),
        "unknown architecture": data.replace(b"llama", b"lxama"),
        "unknown tokenizer": data.replace(b"gpt2", b"xpt2", 1),
        "unknown pre-tokenizer": data.replace(b"gpt-2", b"xpt-2", 1),
        "no merges": data.replace(b"tokenizer.ggml.merges", b"tokenizer.ggml.mergez", 1),
        "no vocabulary": data.replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz", 1),
    }
