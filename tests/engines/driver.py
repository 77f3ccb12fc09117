"""The engine's loop without its process: turns prompts into sequences, steps a backend, and collects what callers get."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from slimproc.engines.backend import Backend, Event, Produced, PromptScored, Scored, SequenceFailed
from slimproc.engines.grammar.matcher import GrammarMatcher
from slimproc.engines.sequence import Sequence
from slimproc.ipc.wire import Logprob, ModelInfo, Said, ScoredTok, Submit, Tok
from slimproc.request import Finish, SamplingParams, Usage

STEP_LIMIT = 20_000
"""Steps after which a sequence that has not ended never will."""


class Generation:
    """One sequence's answer as its caller would see it."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.text = ""
        self.pieces: list[bytes] = []
        self.logprobs: list[Logprob] = []
        self.said = 0
        self.finish: Finish | None = None
        self.usage = Usage()
        self.failure: str | None = None

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.failure is not None

    def take(self, item: Tok) -> None:
        assert not self.ended, "one terminal event, and nothing after it"
        if isinstance(item, ScoredTok):
            self.logprobs += item.logprobs
        self.text += item.text
        self.said += item.tokens
        if item.finish:
            self.finish = Finish(item.finish)
            assert item.usage is not None
            self.usage = item.usage
            told = self.sequence.spoken + self.said
            assert told == self.usage.completion_tokens, "the counts of the pieces add up"


class Engine:
    """A loaded backend and its running generations."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.fractions: list[float] = []
        self.info: ModelInfo = backend.load(self.fractions.append)
        self._rids = itertools.count(1)
        self._running: dict[int, Generation] = {}

    def tokens(self, text: str) -> list[int]:
        return self.backend.tokenize(text, add_special=True, parse_special=True)

    def text_of(self, tokens: list[int]) -> str:
        return self.backend.detokenize(tokens).decode("utf-8", "replace")

    def ids(self, generation: Generation) -> list[int]:
        """The answer's tokens, for a vocabulary in which no two tokens have the same bytes."""
        by_piece = {self.backend.detokenize([token]): token for token in range(self.info.vocab_size)}
        return [by_piece[piece] for piece in generation.pieces]

    def submit(
        self,
        prompt: str | list[int],
        max_tokens: int | None = 16,
        stop: tuple[str, ...] = (),
        *,
        logprobs: int | None = None,
        echo: bool = False,
        grammar: GrammarMatcher | None = None,
        said: Said | None = None,
        **sampling: object,
    ) -> Generation:
        """``echo`` is of use with ``logprobs`` only: a plain one is the loop's own affair."""
        command = Submit(
            rid=next(self._rids),
            prompt=prompt,
            max_tokens=max_tokens,
            stop=stop,
            logprobs=logprobs,
            echo=echo,
            said=said,
            sampling=SamplingParams(**{"temperature": 0.0, **sampling}),
        )
        tokens = self.tokens(prompt) if isinstance(prompt, str) else prompt
        before = None if said is None else self.backend.tokenize_continuation(said.text)
        sequence = Sequence(command, tokens, self.info.context, before)
        sequence.grammar = grammar
        generation = Generation(sequence)
        if echo:
            assert sequence.scores_prompt
            sequence.echo_text = prompt if isinstance(prompt, str) else self.text_of(prompt)
        elif sequence.limit == 0:
            generation.take(sequence.end(Finish.LENGTH))
            return generation
        self.backend.add(sequence)
        self._running[sequence.rid] = generation
        return generation

    def step(self) -> None:
        for event in self.backend.step():
            generation = self._running.get(event.sequence.rid)
            if generation is None:  # it has ended in this step, and the backend had gone on
                continue
            for item in self._items(generation, event):
                generation.take(item)
            if generation.ended:
                self._leave(generation)

    @staticmethod
    def _items(generation: Generation, event: Event) -> Iterable[Tok]:
        match event:
            case SequenceFailed():
                generation.failure = event.message
                return []
            case PromptScored():
                return event.sequence.echo_scored(event.scores, last=event.last)
            case Scored():
                generation.pieces.append(event.score.piece)
                return event.sequence.advance_scored(event.score, event.end)
            case Produced():
                generation.pieces.append(event.piece)
                item = event.sequence.advance(event.piece, end=event.end)
                return [] if item is None else [item]
            case _:
                raise AssertionError(f"a sequence that generates gave {event}")

    def cancel(self, generation: Generation) -> None:
        self._leave(generation)
        generation.take(generation.sequence.end(Finish.CANCELLED))

    def finish(self, *generations: Generation) -> None:
        """Step until all of these (or, without any, all that run) have ended."""
        wanted = generations or tuple(self._running.values())
        for _ in range(STEP_LIMIT):
            if all(generation.ended for generation in wanted):
                return
            self.step()
        raise AssertionError("a sequence never ended")

    def until_generating(self, generation: Generation) -> None:
        for _ in range(STEP_LIMIT):
            if generation.sequence.generated:
                return
            self.step()
        raise AssertionError("a sequence never began")

    def complete(self, prompt: str | list[int], max_tokens: int | None = 16, **options: object) -> Generation:
        generation = self.submit(prompt, max_tokens, **options)
        self.finish(generation)
        return generation

    def _leave(self, generation: Generation) -> None:
        del self._running[generation.sequence.rid]
        self.backend.remove(generation.sequence)

    def close(self) -> None:
        self.backend.close()


Open = Callable[..., Engine]
"""Keywords ``slots`` (default 4) and ``context`` (default 256); the engine is closed when the test ends."""
