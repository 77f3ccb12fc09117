"""The fake's log probabilities: every token has the script's, and the other tokens have no probability at all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from slimproc.engines.backend import Event, Produced, PromptScored, Scored
from slimproc.engines.fake import vocabulary
from slimproc.engines.scores import Score

_TOGETHER: Final = 512
"""Tokens of a prompt that come in one step: all at once could be more than a client's connection takes."""

if TYPE_CHECKING:
    from slimproc.engines.fake.script import Script
    from slimproc.engines.sequence import Sequence


def scored(events: Iterator[Event], sequence: Sequence, script: Script) -> Iterator[Event]:
    """``events`` of a sequence that wants log probabilities, with them; before them its prompt's, if it wants those.

    The alternatives of any token are itself, `` alt1``, `` alt2``, … as many as were asked for.
    """
    logprob = 0.0 if script.logprob is None else float(script.logprob)
    count = sequence.logprobs or 0
    others = [(b" alt%d" % place, -math.inf) for place in range(1, count)]

    def score(piece: bytes) -> Score:
        return Score(piece, logprob, [(piece, logprob), *others] if count else [])

    if sequence.scores_prompt:
        first, *rest = vocabulary.pieces(sequence.prompt)
        scores = [Score(first, None, []), *map(score, rest)]
        for start in range(0, len(scores), _TOGETHER):
            yield PromptScored(sequence, scores[start : start + _TOGETHER], start + _TOGETHER >= len(scores))
    for event in events:
        yield Scored(sequence, score(event.piece), event.end) if isinstance(event, Produced) else event
