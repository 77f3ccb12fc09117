"""The bodies of ``POST /tokenize`` and ``/detokenize``: llama-server's field names, and vLLM's ``prompt``."""

from __future__ import annotations

import msgspec

from slimproc.errors import InvalidRequest
from slimproc.http.decode import decode, unsupported
from slimproc.http.openai.fields import TokenId


class TokenizeCall(msgspec.Struct, frozen=True):
    model: str | None
    text: str
    add_special: bool
    """Whether the model's own BOS and EOS are added."""
    parse_special: bool
    """Whether control tokens' texts become control tokens."""


class DetokenizeCall(msgspec.Struct, frozen=True):
    model: str | None
    tokens: list[int]


class _TokenizeBody(msgspec.Struct):
    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class _DetokenizeBody(msgspec.Struct):
    tokens: list[TokenId]
    model: str | None = None


_tokenize = msgspec.json.Decoder(_TokenizeBody)
_detokenize = msgspec.json.Decoder(_DetokenizeBody)


def parse_tokenize(body: bytes) -> TokenizeCall:
    """One of ``content`` and ``prompt``; llama-server's defaults. Raises InvalidRequest."""
    fields = decode(body, _tokenize)
    if fields.content is not None and fields.prompt is not None:
        raise InvalidRequest("prompt: content is there too; send one of them", param="prompt")
    text = fields.content if fields.content is not None else fields.prompt
    if text is None:
        raise InvalidRequest("content: is required", param="content")
    if fields.with_pieces:
        raise unsupported("with_pieces")
    return TokenizeCall(
        model=fields.model,
        text=text,
        add_special=bool(fields.add_special),
        parse_special=fields.parse_special is not False,
    )


def parse_detokenize(body: bytes) -> DetokenizeCall:
    """An empty list of tokens is an empty text. Raises InvalidRequest."""
    fields = decode(body, _detokenize)
    return DetokenizeCall(fields.model, fields.tokens)
