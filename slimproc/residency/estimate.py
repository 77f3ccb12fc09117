"""Estimate: what a model will need before anybody has measured it: its file, the keys and values of its context, and some."""

from __future__ import annotations

import glob
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimproc import model_path
from slimproc.config import ModelConfig
from slimproc.errors import LoadFailed
from slimproc.residency.gguf_numbers import read_numbers
from slimproc.residency.views import HOST, Claim
from slimproc.settings import BACKENDS

MIB = 1 << 20
ENGINE_BYTES = 160 * MIB
"""An engine without its model: the interpreter, the library, and the buffers of one step."""
GPU_EXTRA = 600 * MIB
"""The context that a driver makes for every process, and a step's buffers."""
DEFAULT_CONTEXT = 4096
_CACHE_BYTES = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
"""Bytes of one number in the cache of keys and values."""
_UNKNOWN_CACHE = 128 * 1024
"""Bytes of one token's keys and values where the file does not say: those of an 8-billion model with shared heads."""


def estimate(model: ModelConfig, device: str, environ: Mapping[str, str]) -> Claim:
    """An upper guess for a local model on ``device``. A file that is not there claims nothing: its load says so better."""
    assert model.backend is not None, "of an upstream nothing can be guessed"
    traits = BACKENDS[model.backend]
    if traits.declares_bytes:
        return Claim(model.fake.bytes, model.fake.bytes, source="configured")  # it is what it says, whatever is seen
    try:
        path = model_path.resolve(model.path or "", environ)
        size = _size(path)
        adapters = sum(_size(model_path.resolve(each.path, environ)) for each in model.lora)
    except (LoadFailed, OSError):
        return Claim(0, 0)
    cache = _cache_bytes(model, path)
    if device != HOST:
        total = size + adapters + cache + GPU_EXTRA
        return Claim(total, total)
    private = adapters + cache + ENGINE_BYTES
    if traits.maps_file and model.mmap:
        return Claim(private, private, file=str(path), file_bytes=size)
    return Claim(private + size, private + size)


def _size(path: Path) -> int:
    """Bytes of a file with the other shards beside it, or of the weights in a directory."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.glob("*.safetensors"))
    stem, _, rest = path.name.partition("-00001-of-")
    shards = path.parent.glob(f"{glob.escape(stem)}-*-of-{glob.escape(rest)}") if rest else [path]
    return sum(file.stat().st_size for file in shards)


def _cache_bytes(model: ModelConfig, path: Path) -> int:
    """Keys and values of all slots' contexts (two numbers a head dimension, shared head and layer)."""
    numbers = read_numbers(path) if path.suffix == ".gguf" else {}
    context = model.context or min(DEFAULT_CONTEXT, _positive(numbers, "context_length", DEFAULT_CONTEXT))
    layers = _positive(numbers, "block_count", 0)
    width = _positive(numbers, "embedding_length", 0)
    heads = _positive(numbers, "attention.head_count", 0)
    if not (layers and width and heads):
        per_token: float = _UNKNOWN_CACHE
    else:
        shared = _positive(numbers, "attention.head_count_kv", heads)
        key = _positive(numbers, "attention.key_length", width // heads)
        value = _positive(numbers, "attention.value_length", width // heads)
        per_token = layers * shared * (key + value) * _CACHE_BYTES[model.kv_type]
    return math.ceil(per_token * context * model.slots)


def _positive(numbers: Mapping[str, Any], key: str, default: int) -> int:
    """A number of the file's architecture (``llama.block_count`` is ``block_count`` here); of a list, the largest."""
    value = numbers.get(key)
    if isinstance(value, list):
        value = max((item for item in value if isinstance(item, int)), default=None)
    return value if isinstance(value, int) and 0 < value < 1 << 24 else default
