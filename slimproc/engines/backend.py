"""The one interface that llama.cpp, MLX and the fake implement, and the table of who implements it.

A backend computes and nothing else: it is called by one thread, never waits for the front, and knows neither text nor
limits. ``sequence.py`` turns its bytes into text and decides where a sequence ends; ``loop.py`` calls it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from slimproc.errors import LoadFailed

if TYPE_CHECKING:
    from slimproc.engines.grammar.vocabulary import GrammarVocabulary
    from slimproc.engines.pooled import PooledSequence
    from slimproc.engines.scores import Score
    from slimproc.engines.sequence import Sequence
    from slimproc.ipc.wire import ModelInfo
    from slimproc.settings import EngineSettings


class Produced(NamedTuple):
    """One new token of one sequence: ``piece`` is its bytes. ``end``: the model ended by itself after ``piece``."""

    sequence: Sequence
    piece: bytes
    end: bool = False


class Embedded(NamedTuple):
    """All that comes of a pooled sequence: little-endian float32, of length 1 (an L2 norm), or a rank's one value."""

    sequence: PooledSequence
    vector: bytes


class Scored(NamedTuple):
    """``Produced`` for a sequence that has ``scores``; the log probability of an end without a piece is not read."""

    sequence: Sequence
    score: Score
    end: bool = False


class PromptScored(NamedTuple):
    """The next of the prompt's own tokens, for a sequence that ``scores_prompt``; the ``last`` before any of the answer."""

    sequence: Sequence
    scores: list[Score]
    last: bool


class SequenceFailed(NamedTuple):
    """One sequence cannot go on; its neighbours can."""

    sequence: Sequence
    message: str


Event = Produced | Scored | PromptScored | Embedded | SequenceFailed


class Backend(Protocol):
    """Who may call: the engine's one thread. Errors: see each method; anything else is a bug and ends the engine.

    ``gives_logprobs`` and ``gives_prompt_logprobs`` are attributes that may be absent, which is False: then sequences
    that ask for them are refused before they come here.
    So may two that ``confine`` reads: ``uses_gpu``, which keeps what drivers need, and ``scratch``, paths of folders
    that the backend goes on writing to.
    A method ``least_tokens(text)`` may be there: no fewer tokens does the text have, which must be known at little cost; 0
    where nothing is known. What cannot fit is refused by it without being tokenized.
    """

    @property
    def poll_interval(self) -> float | None:
        """Seconds that the loop may wait for commands before it calls ``step`` again; a plain attribute will do.

        0: a step has work at once. None: there is no clock to wait for, so while sequences run a step has work (a
        backend that computes says so always, the fake when nothing runs).
        """

    def load(self, progress: Callable[[float], None]) -> ModelInfo:
        """Load the model. Raises LoadFailed."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of ``text``. At most one BOS is added, and none to a text that brings its own."""

    def tokenize_spans(self, text: str, literals: list[tuple[int, int]]) -> list[int]:
        """Token ids of a rendered chat: control tokens are parsed everywhere but in the character spans ``literals``."""

    def tokenize_continuation(self, text: str) -> list[int]:
        """Token ids of a text that goes on where other tokens end: nothing is put in front, control tokens are not parsed."""

    def tokenize_input(self, text: str, *, query: str | None) -> list[int]:
        """Token ids of a text whose vector is wanted, or of ``query`` and a document; control tokens are not parsed.

        Asked only of a backend whose ModelInfo says that it can embed or rerank, as are pooled sequences.
        """

    def detokenize(self, tokens: list[int]) -> bytes: ...

    def grammar_vocabulary(self) -> GrammarVocabulary:
        """What compiling grammars takes; asked once, from another thread, while steps go on.

        Raises InvalidRequest for a backend that follows none. One that gives it follows ``sequence.grammar``: it
        chooses among what ``mask`` allows, ``accept``s the choice unless it is an end, and says ``end`` with the token
        that leaves the grammar ``stopped``.
        """

    def add(self, sequence: Sequence) -> None:
        """Let a sequence join the batch from the next step on. Its prompt fits; a slot is free.

        Raises InvalidRequest for what only the backend can see is wrong (a bad script of the fake); then nothing was added.
        """

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence at any stage, between two steps."""

    def step(self) -> Iterable[Event]:
        """Advance the whole batch by one call of the model: one token a sequence, none while it prefills, several where
        guesses were right. A sequence's events follow one another; what comes after its end is dropped.

        A sequence whose limit is 0 is here for its ``PromptScored`` only. A pooled sequence ends with its one Embedded;
        which of those share a call is the backend's to say.
        """

    def close(self) -> None: ...


BACKENDS = {
    "fake": "slimproc.engines.fake:FakeBackend",
    "llama_cpp": "slimproc.engines.llama_cpp.backend:LlamaCppBackend",
    "mlx": "slimproc.engines.mlx.backend:MlxBackend",
}


def create(settings: EngineSettings) -> Backend:
    """The backend that ``settings`` names, its library imported only now. Raises LoadFailed."""
    try:
        module, name = BACKENDS[settings.backend].split(":")
    except KeyError:
        raise LoadFailed(f"unknown backend {settings.backend!r}", permanent=True) from None
    try:
        factory = getattr(importlib.import_module(module), name)
    except ImportError as error:
        extra = {"llama_cpp": "llama", "mlx": "mlx"}.get(settings.backend, settings.backend)
        raise LoadFailed(
            f"backend {settings.backend} is not installed ({error}): it is slimproc's extra {extra!r}, "
            f"in a checkout pip install '.[{extra}]'",
            permanent=True,
        ) from error
    return cast("Backend", factory(settings))
