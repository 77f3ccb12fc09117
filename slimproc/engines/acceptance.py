"""Acceptance: what a command must pass before it becomes a sequence, and the questions that need none.

All is checked here, before native code sees it, which looks at nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slimproc.engines.pooled import PooledSequence
from slimproc.engines.sequence import Sequence
from slimproc.errors import ContextLengthExceeded, InvalidRequest
from slimproc.ipc import wire

if TYPE_CHECKING:
    from slimproc.engines.backend import Backend


_LONG = 1 << 14
"""Characters that are tokenized without a look: that takes milliseconds."""


class Acceptance:
    """For one loaded model. What is refused raises InvalidRequest; nothing here changes anything."""

    def __init__(self, backend: Backend, model: wire.ModelInfo) -> None:
        self._backend = backend
        self._model = model

    def sequence(self, command: wire.Submit) -> Sequence:
        """The sequence that a Submit asks for."""
        prompt = self._prompt_tokens(command)
        if not prompt:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if len(prompt) >= self._model.context:
            raise ContextLengthExceeded(
                f"this model's context is {self._model.context} tokens, and the prompt alone has {len(prompt)}",
                param="messages" if command.chat else "prompt",
            )
        said = None if command.said is None else self._backend.tokenize_continuation(command.said.text)
        sequence = Sequence(command, prompt, self._model.context, said)
        able = "gives_prompt_logprobs" if sequence.scores_prompt else "gives_logprobs"
        if sequence.scores is not None and not getattr(self._backend, able, False):
            what = "logprobs with echo are" if sequence.scores_prompt else "logprobs are"
            raise InvalidRequest(f"logprobs: {what} not supported for this model", param="logprobs")
        return sequence

    def pooled(self, command: wire.Embed) -> PooledSequence:
        """The sequence that an Embed asks for."""
        prompt = command.prompt
        if isinstance(prompt, str):
            self._check_length(prompt + (command.query or ""), None)
            prompt = self._backend.tokenize_input(prompt, query=command.query)
        if not prompt:
            raise InvalidRequest("the text has no tokens")
        self._check_ids(prompt, command.name)
        if len(prompt) > self._model.context:  # nothing is generated, so all of it may be the prompt's
            raise ContextLengthExceeded(
                f"this model's context is {self._model.context} tokens, and this has {len(prompt)}"
            )
        return PooledSequence(command, prompt, self._model.context)

    def _prompt_tokens(self, command: wire.Submit) -> list[int]:
        if isinstance(command.prompt, str):
            self._check_length(command.prompt, "messages" if command.chat else "prompt")
            if command.chat:
                return self._backend.tokenize_spans(command.prompt, command.literals)
            return self._backend.tokenize(command.prompt, add_special=True, parse_special=True)
        self._check_ids(command.prompt, "prompt")
        return command.prompt

    def _check_length(self, text: str, param: str | None) -> None:
        """To tokenize megabytes takes seconds, in which all sequences wait: what cannot fit is refused before."""
        least = getattr(self._backend, "least_tokens", None)
        if least is None or len(text) <= _LONG:
            return
        tokens = least(text)
        if tokens > self._model.context:
            raise ContextLengthExceeded(
                f"this model's context is {self._model.context} tokens, and the text alone has {tokens} or more",
                param=param,
            )

    def _check_ids(self, tokens: list[int], param: str) -> None:
        """What is not in the vocabulary must never reach native code, which does not look."""
        unknown = next((token for token in tokens if not 0 <= token < self._model.vocab_size), None)
        if unknown is not None:
            raise InvalidRequest(
                f"token id {unknown} is not in this model's vocabulary (0 to {self._model.vocab_size - 1})",
                param=param,
            )

    def prompt_text(self, command: wire.Submit) -> str:
        """What an echo says."""
        if isinstance(command.prompt, str):
            return command.prompt
        return self._backend.detokenize(command.prompt).decode("utf-8", "replace")

    def answer(self, question: wire.Tokenize | wire.Detokenize) -> wire.Report:
        """The answer to a question; a refusal is one, too."""
        try:
            if isinstance(question, wire.Tokenize):
                self._check_length(question.text, "content")
                tokens = self._backend.tokenize(
                    question.text, add_special=question.add_special, parse_special=question.parse_special
                )
                return wire.Tokenized(question.question, tokens)
            self._check_ids(question.tokens, "tokens")
            text = self._backend.detokenize(question.tokens).decode("utf-8", "replace")
            return wire.Detokenized(question.question, text)
        except InvalidRequest as error:
            return wire.QuestionRefused(question.question, error.message, error.param)
