"""What a model's settings may be: checked before native code, which would abort on many of them; and what they cost."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

from slimproc.engines.llama_cpp.header import Header
from slimproc.engines.llama_cpp.library import lib
from slimproc.errors import LoadFailed
from slimproc.settings import EngineSettings

MOST_SPECULATION = 16
"""Guesses in a step: each costs its share of one even when it is wrong."""
_DEFAULT_CONTEXT = 4096
_MAX_SLOTS, _MIN_CONTEXT, _MAX_CELLS, _MAX_THREADS = 256, 8, 1 << 30, 512


class KvType(NamedTuple):
    """``number``: ggml's. A block of ``elements`` takes ``size`` bytes."""

    number: int
    elements: int
    size: int


KV_TYPES = {
    "f16": KvType(lib.GGML_TYPE_F16, 1, 2),
    "q8_0": KvType(lib.GGML_TYPE_Q8_0, 32, 34),
    "q4_0": KvType(lib.GGML_TYPE_Q4_0, 32, 18),
}


def check_settings(settings: EngineSettings) -> None:
    """Raises LoadFailed (permanent) for numbers on which native code would abort, or that make no sense."""
    limits: list[tuple[str, int | None, int, int]] = [
        ("slots", settings.slots, 1, _MAX_SLOTS),
        ("context", settings.context, _MIN_CONTEXT, _MAX_CELLS // max(1, settings.slots)),
        ("threads", settings.threads, 1, _MAX_THREADS),
        ("gpu_layers", settings.gpu_layers, 0, 1 << 20),
        ("speculation", settings.speculation, 0, MOST_SPECULATION),
    ]
    for name, value, low, high in limits:
        if value is not None and not low <= value <= high:
            raise LoadFailed(f"{name} is {value}; it must be between {low} and {high}", permanent=True)
    if settings.kv_type not in KV_TYPES:
        raise LoadFailed(f"kv_type is {settings.kv_type!r}; it must be {', '.join(KV_TYPES)}", permanent=True)
    if settings.kv_type != "f16" and settings.flash_attention is False:
        raise LoadFailed(f"kv_type {settings.kv_type} needs flash_attention, which is off", permanent=True)
    for adapter in settings.lora:
        if not math.isfinite(adapter.scale):
            raise LoadFailed(f"lora {adapter.path}: its scale is {adapter.scale}", permanent=True)


def context_tokens(settings: EngineSettings, trained: int, *, bounded: bool) -> int:
    """``bounded``: what reads texts whole often has a table of positions that it was trained with, and none after it."""
    if settings.context is None:
        return max(min(trained, _DEFAULT_CONTEXT), _MIN_CONTEXT) if trained > 0 else _DEFAULT_CONTEXT
    if not 0 < trained < settings.context:
        return settings.context
    limited = f", so it is {trained}" if bounded else ""
    warn(f"context {settings.context} is more than the {trained} tokens this model was trained for{limited}")
    return trained if bounded else settings.context


def kv_bytes_per_token(model: Any, header: Header, kv_type: str) -> int:
    """From the file's own keys: two vectors of ``kv_type`` a layer and token, for each KV head."""
    arch = header.values.get("general.architecture", "")
    width = lib.llama_model_n_embd(model) // max(1, lib.llama_model_n_head(model))
    key = header.values.get(f"{arch}.attention.key_length", width)
    value = header.values.get(f"{arch}.attention.value_length", width)
    values = lib.llama_model_n_layer(model) * lib.llama_model_n_head_kv(model) * (key + value)
    return int(values * KV_TYPES[kv_type].size / KV_TYPES[kv_type].elements)


def warn(message: str) -> None:
    """To stderr, which is this process's log."""
    print(f"warning: {message}", file=sys.stderr, flush=True)  # noqa: T201  # see above
