"""PromptScorer: the log probabilities of a prompt's own tokens, gathered while it is evaluated in chunks."""

from __future__ import annotations

from typing import Final

from slimproc.engines.backend import PromptScored
from slimproc.engines.llama_cpp.sampling import Floats
from slimproc.engines.llama_cpp.vocabulary import Vocabulary
from slimproc.engines.logprobs import score
from slimproc.engines.scores import Score
from slimproc.engines.sequence import Sequence

SCORED_ROWS: Final = 32
"""Prompt tokens that one call may score, of all sequences together: with a vocabulary of 150,000, llama.cpp keeps 0.6 MB
of logits for each (and aborts the process for more rows than its context was made for), and each takes numpy 0.4 ms that
running answers wait."""


class PromptScorer:
    """One sequence's. Its slot must evaluate the whole prompt, with logits for every token."""

    def __init__(self, sequence: Sequence, vocabulary: Vocabulary) -> None:
        self._sequence = sequence
        self._count = sequence.logprobs or 0
        self._pieces = vocabulary.pieces(sequence.prompt)
        self._spelled = vocabulary.spelled
        self._done = 0

    def take(self, rows: Floats) -> PromptScored:
        """Their scores, of the logits after the next ``len(rows)`` tokens of the prompt. The logits after its last token
        are the answer's affair.
        """
        prompt, pieces = self._sequence.prompt, self._pieces
        scores = [] if self._done else [Score(pieces[0], None, [])]
        for at, row in enumerate(rows[: len(prompt) - self._done - 1], self._done + 1):
            scores.append(score(row, prompt[at], pieces[at], self._count, self._spelled))
        self._done += len(rows)
        return PromptScored(self._sequence, scores, self._done == len(prompt))
