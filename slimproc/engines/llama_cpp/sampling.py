"""A sequence's way to choose tokens: penalties, bias, grammar, temperature, limits, and a seed of its own.

Nothing here depends on what else is in the batch: a sampler sees its own row and draws from its own generator.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from slimproc.engines.grammar.matcher import GrammarMatcher
from slimproc.engines.llama_cpp.drawing import Floats, Ids, draw, draw_limited, draw_mostly_inside, shortlist
from slimproc.errors import InvalidRequest
from slimproc.request import SamplingParams

_GREEDY_BELOW = 1e-5
"""A temperature under it divides logits into infinities; its answer is the greedy one long before."""
_MOSTLY_INSIDE = 0.7
"""From this top_p on, what is drawn from the whole is mostly in the nucleus, too."""


class NoChoiceError(Exception):
    """The logits hold no token that can be chosen: the model produced NaN, or everything was ruled out."""


class Sampler:
    """One sequence's way to choose. ``plain_greedy``: the largest logit as it is, for which no call is needed."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: list[int],
        vocab_size: int,
        ends: Ids,
        grammar: GrammarMatcher | None = None,
    ) -> None:
        """``ends``: the model's end-of-generation tokens. Raises InvalidRequest for a bias outside the vocabulary."""
        self._params = params
        self._greedy = params.temperature < _GREEDY_BELOW
        self._top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        self._limited = bool(self._top_k) or params.top_p < 1.0 or params.min_p > 0.0
        self._bias = _bias_arrays(params.logit_bias, vocab_size)
        self._barred = ends if params.ignore_eos else None
        self._penalties = Penalties(params, prompt) if _penalizes(params) else None
        self._grammar = grammar
        self._adjusts = any(part is not None for part in (self._bias, self._barred, self._penalties, grammar))
        self.plain_greedy = self._greedy and not self._adjusts
        # An omitted seed is drawn from the system for every sequence: nothing carries over from another.
        entropy = int.from_bytes(os.urandom(16), "little") if params.seed is None else params.seed % (1 << 64)
        self._random = np.random.Generator(np.random.PCG64(entropy)).random
        self._weights = np.zeros(0 if self._greedy else vocab_size, np.float32)

    def choose(self, row: Floats) -> int:
        """The next token's id for a row of logits, which is left as it is. Raises NoChoiceError, GrammarError."""
        if self._adjusts:
            row = self._adjusted(row)
        if self._greedy:
            return greedy(row)
        ids = shortlist(row, self._top_k) if self._top_k else None
        if ids is None:
            return self._draw(self._weigh(row))
        return int(ids[self._draw(self._weigh(row[ids]))])

    def _weigh(self, row: Floats) -> Floats:
        """Weights of logits, the largest 1. They are good until the next call. Raises NoChoiceError."""
        weights = self._weights[: len(row)]
        peak = row.max()
        if not math.isfinite(peak):
            raise NoChoiceError
        np.subtract(row, peak, out=weights)
        if self._params.temperature != 1.0:
            np.divide(weights, self._params.temperature, out=weights)
        np.exp(weights, out=weights)  # none beyond 1: sums stay far from overflow
        return weights

    def _draw(self, weights: Floats) -> int:
        if not self._limited:
            return draw(weights, self._random())
        if self._top_k or self._params.top_p < _MOSTLY_INSIDE:
            return draw_limited(weights, self._params, self._random())
        return draw_mostly_inside(weights, self._params, self._random)

    def accept(self, token: int) -> None:
        """Note a token of the answer, for the penalties."""
        if self._penalties is not None:
            self._penalties.count(token)

    def _adjusted(self, row: Floats) -> Floats:
        row = row.copy()
        if self._penalties is not None:
            self._penalties.apply(row)
        if self._bias is not None:
            ids, values = self._bias
            row[ids] += values
        if self._grammar is not None:
            np.copyto(row, -np.inf, where=~self._allowed(self._grammar))
        elif self._barred is not None:
            row[self._barred] = -np.inf
        return row

    def _allowed(self, grammar: GrammarMatcher) -> npt.NDArray[np.bool_]:
        allowed = grammar.mask()
        if self._barred is not None:
            others = allowed.copy()
            others[self._barred] = False
            if others.any():  # else only an end is left, and to ignore it would leave nothing
                return others
        return allowed


class Penalties:
    """Repetition over prompt and answer (CTRL, arXiv:1909.05858); presence and frequency over the answer, as OpenAI has it."""

    def __init__(self, params: SamplingParams, prompt: list[int]) -> None:
        self._repetition = params.repetition_penalty
        self._presence, self._frequency = params.presence_penalty, params.frequency_penalty
        seen = list(dict.fromkeys(prompt)) if self._repetition != 1.0 else []
        self._places = {token: place for place, token in enumerate(seen)}
        room = max(64, 2 * len(seen))
        self._ids = np.zeros(room, np.int64)
        self._ids[: len(seen)] = seen
        self._counts = np.zeros(room, np.float32)

    def count(self, token: int) -> None:
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._places)
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
        self._counts[place] += 1

    def apply(self, row: Floats) -> None:
        """Change ``row`` in place."""
        size = len(self._places)
        ids, counts = self._ids[:size], self._counts[:size]
        values = row[ids]
        if self._repetition != 1.0:
            values = np.where(values > 0, values / self._repetition, values * self._repetition)
        row[ids] = values - (self._frequency * counts + self._presence * (counts > 0))


def greedy(row: Floats) -> int:
    """The largest logit, the lowest id of equals. Raises NoChoiceError for NaN, which argmax would return."""
    token = int(row.argmax())
    if not math.isfinite(row[token]):
        raise NoChoiceError
    return token


def _penalizes(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _bias_arrays(bias: dict[int, float], vocab_size: int) -> tuple[Ids, Floats] | None:
    if not bias:
        return None
    _check_ids(bias, vocab_size)
    return np.fromiter(bias, np.int64, len(bias)), np.fromiter(bias.values(), np.float32, len(bias))


def _check_ids(ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"logit_bias names token {token}, which is not in this model's vocabulary (0 to {vocab_size - 1})",
                param="logit_bias",
            )
