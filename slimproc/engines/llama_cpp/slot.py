"""Slot: room for one sequence in the batch, what its KV stream holds, and the choice of its next tokens from their logits."""

from __future__ import annotations

from slimproc.engines.backend import Event, Produced, Scored, SequenceFailed
from slimproc.engines.grammar.matcher import GrammarError
from slimproc.engines.llama_cpp.drawing import Floats
from slimproc.engines.llama_cpp.lookup import PromptLookup
from slimproc.engines.llama_cpp.sampling import NoChoiceError, Sampler, greedy
from slimproc.engines.llama_cpp.vocabulary import Vocabulary
from slimproc.engines.logprobs import score
from slimproc.engines.prompt_scores import PromptScorer
from slimproc.engines.sequence import Sequence


class Slot:
    """``tokens[:past]`` are in its KV stream, exactly those; the rest waits for evaluation. Between two steps, that is:
    in the middle of one, the KV of ``guess`` comes behind.
    """

    __slots__ = ("guess", "index", "lookup", "past", "sampler", "scorer", "sequence", "sound", "tokens", "used")

    def __init__(self, index: int) -> None:
        self.index = index
        self.sequence: Sequence | None = None
        self.sampler: Sampler | None = None
        self.scorer: PromptScorer | None = None
        """While the prompt's own log probabilities are still being gathered."""
        self.lookup = PromptLookup()
        self.guess: list[int] = []
        """Tokens that are evaluated in this step in case the model chooses them."""
        self.tokens: list[int] = []
        self.past = 0
        self.sound = True
        """Whether all cells of its KV stream, used or not, hold numbers (see ``cells.py``)."""
        self.used = 0

    @property
    def room(self) -> int:
        """How many tokens may be guessed so that none of them would be the last that the sequence may have."""
        if self.sequence is None or self.scorer is not None:
            return 0
        return self.sequence.limit - self.sequence.generated - 1

    def choose(self, rows: Floats, vocabulary: Vocabulary) -> list[Event]:
        """The next token from the first of ``rows``, and one more from each following row while the guess was right.

        ``past`` goes on by the guesses that were; the KV of the others is left for the caller to take back.
        """
        events: list[Event] = []
        for place, row in enumerate(rows):
            event, token, ended = self._choose_one(row, vocabulary)
            events.append(event)
            if ended or place == len(self.guess) or token != self.guess[place]:
                break
            self.past += 1
        return events

    def _choose_one(self, row: Floats, vocabulary: Vocabulary) -> tuple[Event, int, bool]:
        """What became of it, the token, and whether it was the sequence's last."""
        sequence, sampler = self.sequence, self.sampler
        assert sequence is not None
        assert sampler is not None
        try:
            token = greedy(row) if sampler.plain_greedy else sampler.choose(row)
            end = token in vocabulary.ends
            text = b"" if end else vocabulary.piece(token)
            if sequence.grammar is not None and not end:
                sequence.grammar.accept(token)
                end = sequence.grammar.stopped
        except GrammarError as error:
            message = f"the grammar cannot be followed any further: {error}"
            return SequenceFailed(sequence, message), -1, True
        except NoChoiceError:
            message = "the model gave no token that can be chosen (NaN or all barred)"
            return SequenceFailed(sequence, message), -1, True
        sampler.accept(token)
        self.tokens.append(token)
        if sequence.logprobs is None:
            return Produced(sequence, text, end), token, end
        # Of the logits as they are: what the sampler made of them is its own copy.
        its = score(row, token, text, sequence.logprobs, vocabulary.spelled)
        return Scored(sequence, its, end), token, end
