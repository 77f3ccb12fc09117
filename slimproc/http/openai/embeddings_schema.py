"""The body of ``POST /v1/embeddings``."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from slimproc.errors import InvalidRequest
from slimproc.http.decode import decode
from slimproc.http.openai.call import VectorCall
from slimproc.http.openai.text_or_ids import TextOrIds

MAX_INPUTS: Final = 2048
"""OpenAI's."""


class EmbeddingsCall(VectorCall, frozen=True, kw_only=True):
    base64: bool
    """Vectors as little-endian float32 in base64, which the official clients ask for unasked; else as numbers."""


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    input: msgspec.Raw = msgspec.Raw()
    """Required."""
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None

    def call(self) -> EmbeddingsCall:
        """Raises InvalidRequest."""
        inputs, listed = _input.parse(bytes(self.input))
        names = [f"input[{index}]" for index in range(len(inputs))] if listed else ["input"]
        for name, text in zip(names, inputs, strict=True):
            if not text:
                raise InvalidRequest(f"{name}: is empty", param=name)
        return EmbeddingsCall(
            model=self.model,
            prompts=inputs,
            names=names,
            dimensions=self.dimensions,
            base64=self.encoding_format == "base64",
        )


_body = msgspec.json.Decoder(EmbeddingsBody)
_input = TextOrIds("input", most=MAX_INPUTS)


def parse_embeddings(body: bytes) -> EmbeddingsCall:
    """Raises InvalidRequest, whose ``param`` names the field, or the item (``input[3]``)."""
    return decode(body, _body).call()
