"""How OpenAI's two generation routes spell an answer: chunks, closing chunks, usage, and the joined body.

The chunk templates are built once a request; a token only puts its text between two byte strings.
"""

from __future__ import annotations

import abc
import secrets
import time
from typing import Any, Protocol

import msgspec

from slimproc.http.openai.logprobs import chat_logprobs, legacy_logprobs
from slimproc.http.scored import ScoredStream
from slimproc.ipc.wire import Logprob
from slimproc.request import Finish, GenerateRequest
from slimproc.stream import TokenStream

_encode = msgspec.json.Encoder().encode
_MARK = "\ue000"
"""Stands for the token's text while a template is made; it is not in any id, model name or fixed field."""


class AnswerFormat(Protocol):
    """What the shared handlers need of a route's spelling."""

    def head_and_tail(self, index: int) -> tuple[bytes, bytes]:
        """The bytes around a token's JSON text that make it one event."""

    def scored_event(self, index: int, text: str, logprobs: list[Logprob]) -> bytes:
        """One whole event with the log probabilities of its text."""

    def finish_events(self, index: int) -> dict[int, bytes]:
        """The closing event of a choice, by Finish."""

    def prelude(self) -> bytes:
        """The events that begin a stream."""

    def usage_event(self, streams: list[TokenStream]) -> bytes:
        """The last event before ``[DONE]``; empty unless it was asked for."""

    def body(self, streams: list[TokenStream]) -> bytes:
        """The whole answer at once."""


class _Format(abc.ABC):
    """What both routes share. ``model`` is the configured name, whatever alias the caller used."""

    object: str
    chunk_object: str
    id_prefix: str

    def __init__(self, request: GenerateRequest, *, include_usage: bool = False) -> None:
        self._request = request
        self._include_usage = include_usage
        self._identity = {
            "id": f"{self.id_prefix}{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": request.model,
        }

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        chunk = {**self._identity, "object": self.chunk_object, "choices": choices}
        if self._include_usage:
            chunk["usage"] = usage
        return b"data: " + _encode(chunk) + b"\n\n"

    @abc.abstractmethod
    def _choice(
        self, index: int, text: str | None, finish: str | None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """One choice of a chunk; without ``text`` it closes the choice."""

    @abc.abstractmethod
    def _logprobs(self, tokens: list[Logprob]) -> dict[str, Any]:
        """The route's layout of them."""

    def _all_logprobs(self, stream: TokenStream) -> dict[str, Any] | None:
        return self._logprobs(stream.logprobs) if isinstance(stream, ScoredStream) else None

    def scored_event(self, index: int, text: str, logprobs: list[Logprob]) -> bytes:
        return self._event([self._choice(index, text, None, self._logprobs(logprobs))])

    def head_and_tail(self, index: int) -> tuple[bytes, bytes]:
        head, tail = self._event([self._choice(index, _MARK, None)]).rsplit(_encode(_MARK), 1)
        return head, tail

    def finish_events(self, index: int) -> dict[int, bytes]:
        return {
            int(finish): self._event([self._choice(index, None, finish.reason)])
            for finish in (Finish.STOP, Finish.LENGTH)
        }

    def usage_event(self, streams: list[TokenStream]) -> bytes:
        return self._event([], self._usage(streams)) if self._include_usage else b""

    def _usage(self, streams: list[TokenStream]) -> dict[str, Any]:
        # A prompt is counted once, however many choices were made of it.
        prompts = [stream.usage for stream in streams if stream.index % self._request.n == 0]
        prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
        completion_tokens = sum(stream.usage.completion_tokens for stream in streams)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
        }

    def body(self, streams: list[TokenStream]) -> bytes:
        choices = [self._joined(stream) for stream in streams]
        return _encode({**self._identity, "object": self.object, "choices": choices, "usage": self._usage(streams)})

    @abc.abstractmethod
    def _joined(self, stream: TokenStream) -> dict[str, Any]:
        """One choice of a whole answer."""


class CompletionFormat(_Format):
    """``POST /v1/completions``."""

    object = chunk_object = "text_completion"
    id_prefix = "cmpl-"

    def _choice(
        self, index: int, text: str | None, finish: str | None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {"index": index, "text": text or "", "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, tokens: list[Logprob]) -> dict[str, Any]:
        return legacy_logprobs(tokens, self._request.logprobs or 0)

    def prelude(self) -> bytes:
        return b""

    def _joined(self, stream: TokenStream) -> dict[str, Any]:
        return self._choice(stream.index, stream.text, stream.finish.reason, self._all_logprobs(stream))


class ChatFormat(_Format):
    """``POST /v1/chat/completions``."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def _choice(
        self, index: int, text: str | None, finish: str | None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        delta = {} if text is None else {"content": text}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, tokens: list[Logprob]) -> dict[str, Any]:
        return chat_logprobs(tokens)

    def prelude(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            self._event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
            for index in range(self._request.sequences)
        )

    def _joined(self, stream: TokenStream) -> dict[str, Any]:
        message = {"role": "assistant", "content": stream.text, "refusal": None}
        logprobs = self._all_logprobs(stream)
        return {"index": stream.index, "message": message, "logprobs": logprobs, "finish_reason": stream.finish.reason}
