"""LoRA files: held against the model's header before llama.cpp reads them, and then put in force, all at once."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slimproc.engines.llama_cpp.header import Header, Tensor, read_header, refusal
from slimproc.engines.llama_cpp.library import lib, native_log
from slimproc.errors import LoadFailed
from slimproc.model_path import resolve
from slimproc.settings import LoraAdapter

_KINDS = {0, 1, 8, 30}
"""f32, f16, q8_0 and bf16, which converters write. With integers llama.cpp would end the process in the first step."""
_EMBEDDING = "token_embd.weight"


class CheckedAdapter(NamedTuple):
    path: Path
    scale: float


def describe(adapters: Sequence[LoraAdapter]) -> str:
    """For people."""
    return ", ".join(f"{Path(adapter.path).name} x {adapter.scale:g}" for adapter in adapters) or "none"


def check_adapters(adapters: Sequence[LoraAdapter], model: Header) -> list[CheckedAdapter]:
    """Raises LoadFailed (permanent) for a file that is not there, is broken, or was made for another model than the one
    with the header ``model``: with the file's path, and what is wrong.
    """
    checked = []
    for adapter in adapters:
        try:
            path = resolve(adapter.path)
        except LoadFailed as error:
            raise refusal(f"lora: {error.message}") from None
        _check(path, read_header(path), model)
        checked.append(CheckedAdapter(path, adapter.scale))
    return checked


def apply_adapters(model: Any, context: Any, adapters: list[CheckedAdapter]) -> None:
    """They live as long as ``model``. Raises LoadFailed."""
    if not adapters:
        return
    handles = [_load(model, adapter.path) for adapter in adapters]
    pointers = (lib.llama_adapter_lora_p_ctypes * len(handles))(*handles)
    scales = (ctypes.c_float * len(handles))(*(adapter.scale for adapter in adapters))
    if lib.llama_set_adapters_lora(context, pointers, len(handles), scales) != 0:
        raise LoadFailed(f"lora: {native_log.cause('llama.cpp refused the adapters')}", permanent=True)


def _load(model: Any, path: Path) -> Any:
    native_log.begin()
    handle = lib.llama_adapter_lora_init(model, os.fsencode(path))
    if not handle:
        cause = native_log.cause("llama.cpp refused it without a word")
        raise LoadFailed(f"lora {path}: {cause}", permanent="alloc" not in cause, scarce="alloc" in cause)
    return ctypes.cast(handle, lib.llama_adapter_lora_p_ctypes)


def _check(path: Path, adapter: Header, model: Header) -> None:
    keys, wanted = adapter.values, model.values.get("general.architecture")
    if keys.get("general.type") != "adapter":
        raise refusal(f"lora {path} is no adapter: its general.type is {keys.get('general.type')!r}")
    if keys.get("adapter.type") != "lora":
        raise refusal(f"lora {path} is an adapter of another kind: {keys.get('adapter.type')!r}")
    if keys.get("general.architecture") != wanted:
        made_for = keys.get("general.architecture")
        raise refusal(f"lora {path} was made for a model of the kind {made_for!r}, and this one is {wanted!r}")
    alpha = keys.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, float) or not math.isfinite(alpha):
        raise refusal(f"lora {path} is broken: its adapter.lora.alpha is {alpha!r}")
    if "adapter.alora.invocation_tokens" in keys:
        raise refusal(f"lora {path} acts only after certain tokens of a prompt (aLoRA), which is not supported")
    if f"{_EMBEDDING}.lora_a" in adapter.tensors and "output.weight" not in model.tensors:
        # llama.cpp ends the process: the output would need the two halves the other way round.
        raise refusal(f"lora {path} adapts the embedding, which this model uses for its output, too: not supported")
    names = {name.removesuffix(end) for name in adapter.tensors for end in (".lora_a", ".lora_b") if name.endswith(end)}
    if not names:
        raise refusal(f"lora {path} is broken: it adapts no tensor")
    for name in sorted(names):
        _check_pair(path, name, adapter.tensors, model.tensors.get(name))


def _check_pair(path: Path, name: str, tensors: dict[str, Tensor], base: Tensor | None) -> None:
    """llama.cpp's own rules; an embedding's pair is the other way round."""
    a, b = tensors.get(f"{name}.lora_a"), tensors.get(f"{name}.lora_b")
    if a is None or b is None:
        raise refusal(f"lora {path} is broken: it has one half of what adapts {name}")
    if base is None:
        raise refusal(f"lora {path} adapts {name}, which this model does not have: it was made for another one")
    if not {a.kind, b.kind} <= _KINDS:
        raise refusal(f"lora {path}: what adapts {name} is not f32, f16, bf16 or q8_0")
    down, up, model = _sizes(a), _sizes(b), _sizes(base)
    if name == _EMBEDDING:
        fits = down[1] == model[1] and up[1] == model[0] and down[0] == up[0]
    else:
        fits = down[0] == model[0] and up[1] == model[1] and down[1] == up[0]
    if not fits or 0 in down + up or down[2:] != up[2:]:
        raise refusal(
            f"lora {path} does not fit this model: for {name}, which is {_shown(base)}, it has {_shown(a)} and {_shown(b)}"
        )


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    """Four of them: what is left out is 1."""
    return (*tensor.shape, 1, 1, 1, 1)[:4]


def _shown(tensor: Tensor) -> str:
    return " by ".join(map(str, tensor.shape))
