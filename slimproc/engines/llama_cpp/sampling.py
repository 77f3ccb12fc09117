"""Chooses tokens from logits, in numpy: penalties, bias, temperature, top-k, top-p, min-p and a seed for each sequence.

Nothing here depends on what else is in the batch: a sampler sees its own row and draws from its own generator.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from slimproc.engines.grammar.matcher import GrammarMatcher
from slimproc.errors import InvalidRequest
from slimproc.request import SamplingParams

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_GREEDY_BELOW = 1e-5
"""A temperature under it divides logits into infinities; its answer is the greedy one long before."""
_BLOCK = 256
"""Sums of blocks are vectorized and a running sum over all weights is not: finding a draw costs a tenth this way."""


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
        self._limited = 0 < params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0
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
        weights = self._weights
        peak = row.max()
        if not math.isfinite(peak):
            raise NoChoiceError
        np.subtract(row, peak, out=weights)
        if self._params.temperature != 1.0:
            np.divide(weights, self._params.temperature, out=weights)
        np.exp(weights, out=weights)  # the likeliest token weighs exactly 1; sums stay far from overflow
        if self._limited:
            return draw_limited(weights, self._params, self._random())
        return draw(weights, self._random())

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


def draw(weights: Floats, chance: float) -> int:
    """The id that ``chance`` (from 0, below 1) falls on, each id taking as much of the whole as it weighs."""
    sums = _block_sums(weights)
    return _find(weights, sums, chance * sums[-1])


def draw_limited(weights: Floats, params: SamplingParams, chance: float) -> int:
    """As ``draw``, among what top-k, then top-p, then min-p leave; at least one token. The largest weight is 1.

    Each limit leaves the heaviest so-and-so many of what the one before left, so one sorted list of weights is all
    there is to know; ids come in only for the token that was drawn. Of equal weights the lower ids come first.
    """
    size, top_k = len(weights), params.top_k
    left = np.partition(weights, size - top_k)[size - top_k :] if 0 < top_k < size else weights
    total = float(left.sum(dtype=np.float64))
    # What weighs less than this bound cannot make up 1 - top_p of the total, all together: the nucleus is elsewhere,
    # and mostly hundreds are sorted instead of the whole vocabulary. (Where most stay, picking them costs more.)
    floor = np.float32(min(max(params.min_p, (1.0 - params.top_p) * total / len(left)), 1.0))
    stays = left >= floor
    ascending = np.sort(left[stays] if np.count_nonzero(stays) * 8 < len(left) else left)
    descending = ascending[np.searchsorted(ascending, floor) :][::-1]
    if params.top_p < 1.0:
        descending = descending[: _find(descending, _block_sums(descending), params.top_p * total) + 1]
    sums = _block_sums(descending)
    place = _find(descending, sums, chance * sums[-1])
    weight = descending[place]
    heavier = len(ascending) - int(np.searchsorted(ascending, weight, side="right"))
    return int(np.flatnonzero(weights == weight)[place - heavier])


def _block_sums(weights: Floats) -> npt.NDArray[np.float64]:
    """The running sum at the end of each block."""
    return np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)).astype(np.float64))


def _find(weights: Floats, sums: npt.NDArray[np.float64], target: float) -> int:
    """The first place where the running sum of ``weights`` reaches ``target`` (or passes 0); never one that weighs 0."""
    # A hair less: so that reaching is enough, and a target rounded up to the whole sum is still found.
    target = max(float(np.nextafter(min(target, sums[-1]), 0.0)), 0.0)
    block = int(np.searchsorted(sums, target, side="right"))
    begin = block * _BLOCK
    within = weights[begin : begin + _BLOCK].astype(np.float64)
    before = sums[block - 1] if block else 0.0
    place = int(np.searchsorted(np.cumsum(within), target - before, side="right"))
    if place == len(within):  # the block's sum is rounded to f32: the target lies in the crack before the next block
        place = int(np.flatnonzero(within)[-1])
    return begin + place


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
