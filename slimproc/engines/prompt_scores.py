"""PromptScorer: the log probabilities of a prompt's own tokens, gathered while it is evaluated in chunks."""

from __future__ import annotations

from typing import Final, Protocol

from slimproc.engines.backend import PromptScored
from slimproc.engines.logprobs import Floats, score
from slimproc.engines.scores import Score
from slimproc.engines.sequence import Sequence

SCORED_ROWS: Final = 32
"""Prompt tokens that one call may score, of all sequences together: with a vocabulary of 150,000, the logits of each are
0.6 MB (for more rows than its context was made for llama.cpp aborts the process), and each takes numpy 0.4 ms that
running answers wait."""


class Spelling(Protocol):
    """What a backend's vocabulary can say of tokens."""

    def pieces(self, tokens: list[int]) -> list[bytes]: ...

    def spelled(self, token: int) -> bytes: ...


class PromptScorer:
    """One sequence's. The whole prompt must be evaluated for it, whatever is known of it already."""

    def __init__(self, sequence: Sequence, vocabulary: Spelling, rows: int) -> None:
        """``rows``: how many will be taken, all together; at least one for each token but the last."""
        self._sequence = sequence
        self._count = sequence.logprobs or 0
        self._pieces = vocabulary.pieces(sequence.prompt)
        self._spelled = vocabulary.spelled
        self._rows = rows
        self.done = 0

    def take(self, rows: Floats) -> PromptScored:
        """Their scores, of the logits after the next ``len(rows)`` tokens of the prompt. The logits after its last token
        are the answer's affair.
        """
        prompt, pieces = self._sequence.prompt, self._pieces
        scores = [] if self.done else [Score(pieces[0], None, [])]
        for at, row in enumerate(rows[: len(prompt) - self.done - 1], self.done + 1):
            scores.append(score(row, prompt[at], pieces[at], self._count, self._spelled))
        self.done += len(rows)
        return PromptScored(self._sequence, scores, self.done == self._rows)
