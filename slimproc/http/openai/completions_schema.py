"""The body of ``POST /v1/completions``."""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from slimproc.errors import InvalidRequest
from slimproc.http.decode import decode, decode_field, unsupported
from slimproc.http.openai.call import Call
from slimproc.http.openai.fields import MAX_SEQUENCES, GenerationFields, TokenId, token_count
from slimproc.request import Prompt

DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's."""


class CompletionBody(GenerationFields, kw_only=True):
    prompt: msgspec.Raw = msgspec.Raw()
    """Required. Decoded once its form is known, so that 200,000 token ids are one decoder's work."""
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    logprobs: int | bool | None = None

    def call(self) -> Call:
        """Raises InvalidRequest."""
        prompts = parse_prompt(bytes(self.prompt))
        n = self.copies(len(prompts))
        if self.best_of not in {None, 1, n}:
            raise unsupported("best_of", "only 1 or the value of n is supported")
        if self.suffix is not None:
            raise unsupported("suffix")
        if self.logprobs is not None and self.logprobs is not False:
            raise unsupported("logprobs")  # 0 asks for the chosen tokens' own
        return Call(
            model=self.model,
            stream=bool(self.stream),
            include_usage=self.include_usage(),
            prompts=prompts,
            n=n,
            max_tokens=token_count("max_tokens", self.max_tokens),
            max_tokens_field="max_tokens",
            default_max_tokens=DEFAULT_MAX_TOKENS,
            stop=self.stops(),
            echo=bool(self.echo),
            sampling=self.sampling(),
        )


_body = msgspec.json.Decoder(CompletionBody)

_Ids = Annotated[list[TokenId], Meta(min_length=1)]
_text = msgspec.json.Decoder(str)
_texts = msgspec.json.Decoder(Annotated[list[str], Meta(min_length=1, max_length=MAX_SEQUENCES)])
_ids = msgspec.json.Decoder(_Ids)
_id_lists = msgspec.json.Decoder(Annotated[list[_Ids], Meta(min_length=1, max_length=MAX_SEQUENCES)])

_FIRST: Final = re.compile(rb"\[\s*(.)", re.DOTALL)


def parse_completion(body: bytes) -> Call:
    """Raises InvalidRequest, whose ``param`` names the field."""
    return decode(body, _body).call()


def parse_prompt(value: bytes) -> list[Prompt]:
    """The four forms: a string, a list of them, a list of token ids, a list of those. ``""`` is a prompt.

    The first element says which form a list has; one of another form is refused. Raises InvalidRequest.
    """
    if not value:
        raise InvalidRequest("prompt: is required", param="prompt")
    first = _FIRST.match(value)
    if first is None:
        if not value.startswith(b'"'):
            raise InvalidRequest("prompt: expected string or array", param="prompt")
        return [decode_field(value, _text, "prompt")]
    if first[1] in b"-0123456789":
        return [decode_field(value, _ids, "prompt")]
    if first[1] == b"[":
        id_lists = decode_field(value, _id_lists, "prompt")
        return list(id_lists)
    texts = decode_field(value, _texts, "prompt")
    return list(texts)
