"""The body of ``POST /v1/completions``."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from slimproc.errors import InvalidRequest
from slimproc.http.decode import decode, unsupported
from slimproc.http.openai.call import Call
from slimproc.http.openai.fields import MAX_SEQUENCES, GenerationFields, token_count
from slimproc.http.openai.text_or_ids import TextOrIds

DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's."""


class CompletionBody(GenerationFields, kw_only=True):
    prompt: msgspec.Raw = msgspec.Raw()
    """Required. Decoded once its form is known, so that 200,000 token ids are one decoder's work."""
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | bool | None = None
    """How many of the likeliest tokens to name beside each token's own log probability. False is the same as null."""

    def call(self) -> Call:
        """Raises InvalidRequest."""
        prompts, _ = _prompt.parse(bytes(self.prompt))
        if [] in prompts:
            raise InvalidRequest("prompt: a list of token ids is empty", param="prompt")
        n = self.copies(len(prompts))
        if self.best_of not in {None, 1, n}:
            raise unsupported("best_of", "only 1 or the value of n is supported")
        if self.suffix is not None:
            raise unsupported("suffix")
        if self.logprobs is True:
            raise InvalidRequest("logprobs: expected integer from 0 to 5, got true", param="logprobs")
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
            logprobs=None if isinstance(self.logprobs, bool) else self.logprobs,
            sampling=self.sampling(),
            grammar=self.structure(),
        )


_body = msgspec.json.Decoder(CompletionBody)

_prompt = TextOrIds("prompt", most=MAX_SEQUENCES)


def parse_completion(body: bytes) -> Call:
    """Raises InvalidRequest, whose ``param`` names the field."""
    return decode(body, _body).call()
