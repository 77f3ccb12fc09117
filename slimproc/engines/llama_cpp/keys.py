"""What a GGUF file's keys must say for it to be a model that llama.cpp can be given. Says in one line what they say instead."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from slimproc.engines.llama_cpp.header import Header, refusal
from slimproc.engines.llama_cpp.limits import warn

_OTHER_PARTS = {
    "adapter": "a LoRA adapter, not a model: name it under lora, and the model it was made for as the path",
    "mmproj": "the part of a model that sees or hears (mmproj), not the model itself",
    "imatrix": "an importance matrix, which quantizing needs, not a model",
    "vocab": "a vocabulary without a model",
}
_MOST_LAYERS = 512
"""llama.cpp's own limit."""
_NONE = (1 << 32) - 1
"""How some converters write that there is no such token."""
_NAMED_TOKENS = ("bos", "eos", "eot", "unknown", "seperator", "padding")
"""As GGUF spells them."""


def check_keys(path: Path, header: Header) -> None:
    """Raises LoadFailed (permanent) for a file that is no model, or that contradicts itself where llama.cpp would go on
    with something else in silence. What is merely odd is said on stderr.
    """
    values = header.values
    kind, architecture = values.get("general.type"), values.get("general.architecture")
    other = _OTHER_PARTS.get(str(kind)) or (_OTHER_PARTS["mmproj"] if architecture == "clip" else None)
    if other is not None:
        raise refusal(f"{path} is {other}")
    if not isinstance(architecture, str):
        raise refusal(f"{path} is broken: it does not say what kind of model it is (general.architecture)")
    if not header.tensors:
        raise refusal(f"{path} has no tensors: {_OTHER_PARTS['vocab']}, or a broken file")
    if values.get("tokenizer.ggml.model") == "no_vocab":
        raise refusal(f"{path} has no vocabulary (tokenizer.ggml.model is no_vocab), so it can read no text")
    _check_numbers(path, values, architecture)
    if values.get(f"{architecture}.context_length") == 0:
        raise refusal(f"{path} is broken: it says that it was trained for a context of 0 tokens")
    _check_tokens(path, header, architecture)


def _check_numbers(path: Path, values: dict[str, Any], architecture: str) -> None:
    """Those for which llama.cpp ends the process, in the load or in the first step."""
    layers = values.get(f"{architecture}.block_count")
    if isinstance(layers, int) and not 1 <= layers <= _MOST_LAYERS:
        raise refusal(f"{path} is broken: it says that it has {layers} layers")
    for key, value in values.items():
        if key.endswith("_epsilon") and isinstance(value, float) and not (math.isfinite(value) and value >= 0):
            raise refusal(f"{path} is broken: its {key} is {value}")


def _check_tokens(path: Path, header: Header, architecture: str) -> None:
    values = header.values
    tokens = values.get("tokenizer.ggml.tokens")
    words = len(tokens) if isinstance(tokens, list) else header.lengths.get("tokenizer.ggml.tokens")
    if words is None:
        return  # llama.cpp says what it misses
    for name in _NAMED_TOKENS:
        token = values.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token, int) and token != _NONE and not 0 <= token < words:
            raise refusal(
                f"{path} is broken: its {name} token is number {token}, and its vocabulary has {words} tokens"
            )
    size = values.get(f"{architecture}.vocab_size")
    if isinstance(size, int) and size != words:
        warn(f"{path.name} says that its vocabulary has {size} tokens, and it has {words}")
