"""Chooses tokens from logits, in numpy: penalties, bias, temperature, top-k, top-p, min-p and a seed for each sequence.

Nothing here depends on what else is in the batch: a sampler sees its own row and draws from its own generator.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

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

    def __init__(self, params: SamplingParams, prompt: list[int], vocab_size: int, ends: Ids) -> None:
        """``ends``: the model's end-of-generation tokens. Raises InvalidRequest for a bias outside the vocabulary."""
        self._params = params
        self._greedy = params.temperature < _GREEDY_BELOW
        self._limited = 0 < params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0
        self._bias = _bias_arrays(params.logit_bias, vocab_size)
        self._barred = ends if params.ignore_eos else None
        self._penalties = Penalties(params, prompt) if _penalizes(params) else None
        self._adjusts = self._bias is not None or self._barred is not None or self._penalties is not None
        self.plain_greedy = self._greedy and not self._adjusts
        # An omitted seed is drawn from the system for every sequence: nothing carries over from another.
        entropy = int.from_bytes(os.urandom(16), "little") if params.seed is None else params.seed % (1 << 64)
        self._random = np.random.Generator(np.random.PCG64(entropy)).random
        self._weights = np.zeros(0 if self._greedy else -(-vocab_size // _BLOCK) * _BLOCK, np.float32)

    def choose(self, row: Floats) -> int:
        """The next token's id for a row of logits, which is left as it is. Raises NoChoiceError."""
        if self._adjusts:
            row = self._adjusted(row)
        if self._greedy:
            return greedy(row)
        weights = self._weights[: len(row)]
        peak = row.max()
        if not math.isfinite(peak):
            raise NoChoiceError
        np.subtract(row, peak, out=weights)
        if self._params.temperature != 1.0:
            np.divide(weights, self._params.temperature, out=weights)
        np.exp(weights, out=weights)  # the likeliest token weighs exactly 1; sums stay far from overflow
        if self._limited:
            return draw_limited(weights, self._params, self._random())
        return draw(self._weights, self._random())

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
        if self._barred is not None:
            row[self._barred] = -np.inf
        return row


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
    """The id that ``chance`` (from 0, below 1) falls on. The number of weights is a multiple of the block."""
    blocks = weights.reshape(-1, _BLOCK)
    sums = np.cumsum(blocks.sum(axis=1), dtype=np.float64)
    target = _target(chance, sums[-1])
    block = int(np.searchsorted(sums, target, side="right"))
    within = np.cumsum(blocks[block], dtype=np.float64)
    before = sums[block - 1] if block else 0.0
    place = int(np.searchsorted(within, target - before, side="right"))
    if place == _BLOCK:  # block sums are rounded to f32: the draw fell into the crack between two blocks
        place = int(np.flatnonzero(blocks[block])[-1])
    return block * _BLOCK + place


def draw_limited(weights: Floats, params: SamplingParams, chance: float) -> int:
    """As ``draw``, among what top-k, then top-p, then min-p leave; at least one token. The largest weight is 1.

    Each limit leaves the heaviest so-and-so many of what the one before left, so one sorted list of weights is all
    there is to know; ids come in only for the token that was drawn. Of equal weights the lower ids come first.
    """
    size, top_k = len(weights), params.top_k
    left = np.partition(weights, size - top_k)[size - top_k :] if 0 < top_k < size else weights
    total = float(left.sum())
    # What weighs less than this bound cannot make up 1 - top_p of the total, all together: the nucleus is elsewhere,
    # and only hundreds are sorted instead of the whole vocabulary.
    floor = min(max(params.min_p, (1.0 - params.top_p) * total / len(left)), 1.0)
    ascending = np.sort(left[left >= floor])
    sums = np.cumsum(ascending[::-1], dtype=np.float64)
    count = min(int(np.searchsorted(sums, params.top_p * total)) + 1, len(sums))
    place = int(np.searchsorted(sums[:count], _target(chance, sums[count - 1]), side="right"))
    weight = ascending[-1 - place]
    heavier = len(ascending) - int(np.searchsorted(ascending, weight, side="right"))
    return int(np.flatnonzero(weights == weight)[place - heavier])


def _target(chance: float, total: float) -> float:
    """Below ``total`` also where the product is rounded up, so that the search always finds a weight that is not 0."""
    return min(chance * total, float(np.nextafter(total, 0.0)))


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
