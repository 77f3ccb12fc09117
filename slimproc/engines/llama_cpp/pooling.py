"""Whether a model generates text or makes vectors, and how one vector comes of many tokens. The model's file says it."""

from __future__ import annotations

import enum
from typing import Any

from slimproc.engines.llama_cpp.header import Header
from slimproc.engines.llama_cpp.library import lib
from slimproc.errors import LoadFailed
from slimproc.request import EMBED, GENERATE, RERANK


class Pooling(enum.IntEnum):
    """GGUF's numbers, which are llama.cpp's."""

    MEAN = 1
    CLS = 2
    LAST = 3
    RANK = 4
    """Through a head that was trained to say how well a document answers a query."""


def pooling_of(model: Any, header: Header, configured: str | None) -> Pooling | None:
    """None: it generates text. ``configured``: the setting, which wins over the file.

    Raises LoadFailed (permanent) for a model that can do neither, or that only could if it were known how.
    """
    arch = header.values.get("general.architecture", "?")
    if lib.llama_model_has_encoder(model) or lib.llama_model_is_diffusion(model):
        raise LoadFailed(
            f"a model of the kind {arch!r} neither generates text token by token nor embeds", permanent=True
        )
    named = header.values.get(f"{arch}.pooling_type", 0)
    if named == Pooling.RANK:
        if configured is not None:
            raise LoadFailed(f"pooling is {configured}, and this model ranks documents", permanent=True)
        return Pooling.RANK
    if configured is not None:
        return Pooling[configured.upper()]
    if named in (Pooling.MEAN, Pooling.CLS, Pooling.LAST):
        return Pooling(named)
    if header.values.get(f"{arch}.attention.causal") is False:
        raise must_be_told(arch)
    return None


def must_be_told(arch: str) -> LoadFailed:
    """For a model that cannot generate and whose file names no pooling: a guess would give vectors that mean little."""
    return LoadFailed(
        f"a model of the kind {arch!r} does not generate text token by token, and its file does not say how its vectors"
        " are pooled: set pooling to mean, cls or last",
        permanent=True,
    )


def capabilities(pooling: Pooling | None) -> tuple[str, ...]:
    if pooling is None:
        return (GENERATE,)
    return (RERANK,) if pooling is Pooling.RANK else (EMBED,)
