"""A request's work, as every room after ``http/`` sees it; nothing here knows OpenAI's spelling."""

from __future__ import annotations

import enum
import math
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from slimproc.settings import OnCrash


class Finish(enum.IntEnum):
    """How a sequence stands. On the wire as a small integer; RUNNING is every token but the last."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3

    @property
    def reason(self) -> str:
        """OpenAI's word for it."""
        return self.name.lower()


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen. Carried unopened from ``http/`` to the backend; validated once, in ``http/``."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    seed: int | None = None
    """None: drawn anew for every sequence, never carried over."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    ignore_eos: bool = False


class GrammarSpec(msgspec.Struct, frozen=True):
    """What an answer must look like. Checked for size in ``http/``, compiled in the engine, which may still refuse it."""

    kind: Literal["json_schema", "regex", "grammar", "choice"]
    text: str
    """A JSON Schema, a regular expression, a grammar (Lark's or llama.cpp's GBNF notation), a JSON array of texts."""
    param: str
    """The request's field that it came in, for errors."""


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
"""Of tokens or values: what an engine says of them goes into sums, which nonsense must not reach."""


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """Exact counts, made by the engine."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    cached_tokens: Count = 0


class Deadline(msgspec.Struct, frozen=True):
    """An absolute instant on the monotonic clock (seconds). Linux and macOS share that clock between processes."""

    at: float = math.inf

    @classmethod
    def after(cls, seconds: float, now: float) -> Deadline:
        return cls(now + seconds)

    def remaining(self, now: float) -> float:
        """Seconds left; negative once it has passed."""
        return self.at - now


NEVER = Deadline()


class ChatPrompt(msgspec.Struct, frozen=True):
    """Messages that the model's own template will render at hand-over (roles checked, parts joined)."""

    messages: list[dict[str, Any]]


GENERATE, EMBED, RERANK = "generate", "embed", "rerank"
"""What a model can be asked for; its file says which."""

Prompt = str | list[int] | ChatPrompt
"""Raw text (control tokens parsed), token ids, or a chat."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request's work. ``len(prompts) * n`` sequences, in the order of their ``index`` in the answer."""

    id: str
    model: str
    """The configured name, not the caller's alias."""
    prompts: list[Prompt]
    n: int = 1
    max_tokens: int | None = None
    """None: to the end of the context."""
    stop: tuple[str, ...] = ()
    echo: bool = False
    logprobs: int | None = None
    """How many of the likeliest tokens to name beside each token's own log probability; None: no log probabilities."""
    sampling: SamplingParams = SamplingParams()
    grammar: GrammarSpec | None = None
    on_crash: OnCrash = "fail"
    """Its model's."""
    deadline: Deadline = Deadline()
    queue_deadline: Deadline = Deadline()
    """It has its first slot by then, or it is told that it waited too long."""

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.n

    @property
    def capability(self) -> str:
        """What a model must be able to do for it (``ModelInfo.capabilities``)."""
        return GENERATE


class EmbedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request for vectors, or for the ranks of documents; each prompt is one sequence, which generates nothing."""

    n: ClassVar[int] = 1
    id: str
    model: str
    """The configured name, not the caller's alias."""
    prompts: list[Prompt]
    """Texts or token ids; no chats."""
    query: str | None = None
    """Not None: what is wanted is how well each prompt answers it."""
    dimensions: int | None = None
    """The vectors' length; None: the model's own."""
    names: list[str]
    """What the caller calls each prompt (``input[3]``): an error names the one that it is about."""
    deadline: Deadline = Deadline()
    queue_deadline: Deadline = Deadline()

    @property
    def sequences(self) -> int:
        return len(self.prompts)

    @property
    def capability(self) -> str:
        return EMBED if self.query is None else RERANK


Work = GenerateRequest | EmbedRequest
"""What admission queues. All have an id, a model, prompts, ``n``, a deadline and the capability that they need."""
