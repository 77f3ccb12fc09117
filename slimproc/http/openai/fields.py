"""The parameters that completions and chat share: their types, their ranges, and what absent and null mean.

Each range is in the field's type, so that msgspec checks it while it decodes. ``null`` is the same as absent
everywhere, as in OpenAI's own schema. Unknown fields are ignored; a known one of a wrong type never is.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from slimproc.errors import InvalidRequest
from slimproc.http.decode import unsupported
from slimproc.http.openai.structure import StructureFields
from slimproc.request import SamplingParams

MAX_SEQUENCES: Final = 128
"""Sequences that one request may ask for: prompts times ``n``."""

MAX_TOKENS: Final = 2**31 - 1
"""What larger numbers are cut to; the engine then clamps to what fits in the context."""

Count = Annotated[int, Meta(ge=0)] | Annotated[float, Meta(ge=0)]
"""A number of tokens. ``5.0`` is taken, since some clients' languages have no integers; ``2.5`` is not."""

StopText = Annotated[str, Meta(min_length=1, max_length=1000)]
"""One stop string, in characters. An empty one would match everywhere."""

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""llama.cpp's token type. Whether the vocabulary has it is for the engine to say."""


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class GenerationFields(StructureFields, kw_only=True):
    """What both bodies may carry. ``call`` in the subclasses turns it into a ``Call``."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)] | None = None
    max_tokens: Count | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """0 and -1 (vLLM's word) both mean off."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: int | float | None = None
    """64 bits with a sign."""
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=2)] | None = None
    """Logits are divided by it: much less, and they are not finite any more."""
    logit_bias: Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None = None
    """Keys are token ids as decimal strings, JSON having no others."""
    ignore_eos: bool | None = None
    """An extension (vLLM's): go on to ``max_tokens`` whatever the model says."""

    def sampling(self) -> SamplingParams:
        """The fields that have SamplingParams' names. Raises InvalidRequest."""
        chosen = {
            name: value for name in SamplingParams.__struct_fields__ if (value := getattr(self, name)) is not None
        }
        if "seed" in chosen:
            chosen["seed"] = _int64("seed", chosen["seed"])
        if chosen.get("top_k") == -1:
            chosen["top_k"] = 0
        return SamplingParams(**chosen)

    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk. Raises InvalidRequest for stream options without a stream."""
        if self.stream_options is None:
            return False
        if not self.stream:
            raise InvalidRequest("stream_options: only allowed when stream is true", param="stream_options")
        return bool(self.stream_options.include_usage)

    def copies(self, prompts: int) -> int:
        """``n``, which together with the number of prompts stays in bounds. Raises InvalidRequest."""
        n = 1 if self.n is None else self.n
        if prompts * n > MAX_SEQUENCES:
            raise InvalidRequest(
                f"n: {n} answers to {prompts} prompts are more than {MAX_SEQUENCES} sequences", param="n"
            )
        return n


def token_count(field: str, value: float | None) -> int | None:
    """A number of tokens, cut to MAX_TOKENS; None stays None. Raises InvalidRequest for a fraction."""
    return None if value is None else min(_integral(field, value), MAX_TOKENS)


def refuse_given(fields: msgspec.Struct, *names: str) -> None:
    """Raise InvalidRequest for the first of these fields that asks for something: neither null, false nor empty."""
    for name in names:
        if getattr(fields, name):
            raise unsupported(name)


def _int64(field: str, value: float) -> int:
    whole = _integral(field, value)
    if not -(2**63) <= whole < 2**63:
        raise InvalidRequest(f"{field}: expected an integer of 64 bits", param=field)
    return whole


def _integral(field: str, value: float) -> int:
    if isinstance(value, float) and not value.is_integer():
        raise InvalidRequest(f"{field}: expected integer, got {value}", param=field)
    return int(value)
