"""The body of ``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from slimproc.errors import InvalidRequest
from slimproc.http.decode import decode, given, unsupported
from slimproc.http.openai.call import Call
from slimproc.http.openai.fields import Count, GenerationFields, refuse_given, token_count
from slimproc.http.openai.messages import Messages, plain_messages
from slimproc.request import ChatPrompt


class ChatBody(GenerationFields, kw_only=True):
    messages: Messages
    max_completion_tokens: Count | None = None
    """OpenAI's newer name for max_tokens; it wins."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: str | dict[str, msgspec.Raw] | None = None
    functions: list[msgspec.Raw] | None = None
    function_call: str | dict[str, msgspec.Raw] | None = None
    modalities: list[str] | None = None
    audio: msgspec.Raw = msgspec.Raw()
    web_search_options: msgspec.Raw = msgspec.Raw()

    def call(self) -> Call:
        """Raises InvalidRequest."""
        self._refuse_unsupported()
        field = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        token_count("max_tokens", self.max_tokens)  # nonsense stays nonsense, even where it does not count
        return Call(
            model=self.model,
            stream=bool(self.stream),
            include_usage=self.include_usage(),
            prompts=[ChatPrompt(plain_messages(self.messages))],
            n=self.copies(1),
            max_tokens=token_count(field, getattr(self, field)),
            max_tokens_field=field,
            default_max_tokens=None,
            stop=self.stops(),
            logprobs=self._alternatives(),
            sampling=self.sampling(),
            grammar=self.structure(),
        )

    def _alternatives(self) -> int | None:
        """Raises InvalidRequest for alternatives to tokens whose own log probabilities are not wanted."""
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidRequest("top_logprobs: only allowed when logprobs is true", param="top_logprobs")
        return None

    def _refuse_unsupported(self) -> None:
        """Meanings that this server does not have yet. Their harmless values, which SDKs fill in, are let pass."""
        refuse_given(self, "tools", "functions")
        for name in ("tool_choice", "function_call"):
            if getattr(self, name) not in (None, "none", "auto"):
                raise unsupported(name)
        if self.modalities not in (None, ["text"]):
            raise unsupported("modalities", 'only ["text"] is supported')
        for name in ("audio", "web_search_options"):
            if given(getattr(self, name)):
                raise unsupported(name)


_body = msgspec.json.Decoder(ChatBody)


def parse_chat(body: bytes) -> Call:
    """Raises InvalidRequest, whose ``param`` is the field's path (``messages[3].content``)."""
    return decode(body, _body).call()
