"""A request to generate, as every room after ``http/`` sees it; nothing here knows OpenAI's spelling."""

from __future__ import annotations

import enum
import math
from typing import Any

import msgspec


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


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """Exact counts, made by the engine."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Deadline(msgspec.Struct, frozen=True):
    """An absolute instant on the monotonic clock (seconds). Linux and macOS share that clock between processes."""

    at: float = math.inf

    @classmethod
    def after(cls, seconds: float, now: float) -> Deadline:
        return cls(now + seconds)

    def remaining(self, now: float) -> float:
        """Seconds left; negative once it has passed."""
        return self.at - now


class ChatPrompt(msgspec.Struct, frozen=True):
    """Messages that the model's own template will render at hand-over (roles checked, parts joined)."""

    messages: list[dict[str, Any]]


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
    sampling: SamplingParams = SamplingParams()
    deadline: Deadline = Deadline()

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.n
