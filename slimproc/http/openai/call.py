"""A parsed body that still lacks its model: a Call of the routes that generate, a VectorCall of those that compute vectors."""

from __future__ import annotations

from typing import Protocol

import msgspec

from slimproc.errors import InvalidRequest
from slimproc.request import (
    NEVER,
    Deadline,
    EmbedRequest,
    GenerateRequest,
    GrammarSpec,
    Prompt,
    SamplingParams,
)
from slimproc.settings import OnCrash


class ModelLimits(Protocol):
    """What must be known of the model: its configured name, how many tokens a caller may ask for (None: any), and what its
    streams do when an engine dies.
    """

    @property
    def name(self) -> str: ...

    @property
    def max_tokens_limit(self) -> int | None: ...

    @property
    def on_crash(self) -> OnCrash: ...


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Everything in a body that can be checked without its model has been checked."""

    model: str | None
    """As the caller wrote it; None when absent. What it means is the configuration's to say."""
    stream: bool
    include_usage: bool
    prompts: list[Prompt]
    n: int
    max_tokens: int | None
    """What the caller asked for; None: nothing was asked for."""
    max_tokens_field: str
    """The field it stood in."""
    default_max_tokens: int | None
    """What nothing means on this route; None: to the end of the context."""
    stop: tuple[str, ...]
    echo: bool = False
    logprobs: int | None = None
    """Alternatives to name for each token; None: no log probabilities."""
    sampling: SamplingParams
    grammar: GrammarSpec | None = None

    def work(
        self, *, request_id: str, model: ModelLimits, deadline: Deadline, queue_deadline: Deadline = NEVER
    ) -> GenerateRequest:
        """The work. Raises InvalidRequest when more tokens are asked for than the model's limit allows.

        A default is cut to the limit instead, since nobody asked for it.
        """
        limit = model.max_tokens_limit
        wanted = self.max_tokens
        if wanted is None:
            wanted = self.default_max_tokens
            if limit is not None:
                wanted = limit if wanted is None else min(wanted, limit)
        elif limit is not None and wanted > limit:
            field = self.max_tokens_field
            raise InvalidRequest(f"{field}: {wanted} is more than this model's limit of {limit}", param=field)
        return GenerateRequest(
            id=request_id,
            model=model.name,
            prompts=self.prompts,
            n=self.n,
            max_tokens=wanted,
            stop=self.stop,
            echo=self.echo,
            logprobs=self.logprobs,
            sampling=self.sampling,
            grammar=self.grammar,
            on_crash=model.on_crash,
            deadline=deadline,
            queue_deadline=queue_deadline,
        )


class VectorCall(msgspec.Struct, frozen=True, kw_only=True):
    """A body that asks for one vector, or one rank, of each of its ``prompts``. Routes add how they answer."""

    model: str | None
    prompts: list[Prompt]
    names: list[str]
    """What the body calls each of them: ``input[3]``."""
    query: str | None = None
    dimensions: int | None = None

    def work(
        self, *, request_id: str, model: ModelLimits, deadline: Deadline, queue_deadline: Deadline = NEVER
    ) -> EmbedRequest:
        return EmbedRequest(
            id=request_id,
            model=model.name,
            prompts=self.prompts,
            names=self.names,
            query=self.query,
            dimensions=self.dimensions,
            deadline=deadline,
            queue_deadline=queue_deadline,
        )
