"""Chooses tokens from logits, in MLX's lazy arrays: penalties, bias, temperature, top-k, top-p, min-p, a seed each.

An exception inside a step ruins the whole batch, and an id outside the vocabulary is written without a look. So all that
can be wrong is found when the objects here are made, and calling them only ever builds arrays of fixed shapes.
"""

from __future__ import annotations

import os
from typing import Any

from slimproc.engines.mlx.library import mx
from slimproc.errors import InvalidRequest
from slimproc.request import SamplingParams

_GREEDY_BELOW = 1e-5
"""A temperature under it divides logits into infinities; its answer is the greedy one long before."""


def make_sampler(params: SamplingParams, vocab_size: int) -> Sampler | None:
    """One sequence's own sampler, or None for the greedy choice, which BatchGenerator makes for all at once."""
    return None if params.temperature < _GREEDY_BELOW else Sampler(params, vocab_size)


def make_processors(
    params: SamplingParams, prompt: list[int], vocab_size: int, barred: frozenset[int], said: list[int] | None = None
) -> list[Any]:
    """What changes one sequence's logits before a token is chosen. ``barred``: tokens that never are. ``said``: the end
    of ``prompt``, where that is the answer's own beginning.

    Raises InvalidRequest for a bias outside the vocabulary.
    """
    processors: list[Any] = []
    if params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        processors.append(Penalties(params, prompt, vocab_size, said or []))
    bias = dict(params.logit_bias)
    _check_ids(bias, vocab_size)
    bias |= {token: float("-inf") for token in barred if 0 <= token < vocab_size}
    if bias:
        processors.append(Bias(bias, vocab_size))
    return processors


class Sampler:
    """Draws with a generator of its own, so that nothing depends on what else is in the batch.

    Called once a step with normalized log-probabilities, f32 of shape (1, vocabulary); gives ids, shape (1,).
    """

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self._temperature = params.temperature
        self._top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        self._top_p = max(params.top_p, 1e-6)  # above 0 it leaves one token at least
        self._min_p = min(params.min_p, 1.0)
        self._limited = self._top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        # An omitted seed is drawn from the system for every sequence: nothing carries over from another.
        seed = int.from_bytes(os.urandom(8), "little") if params.seed is None else params.seed % (1 << 64)
        self._key = mx.random.key(seed)

    def __call__(self, logprobs: Any) -> Any:
        self._key, key = mx.random.split(self._key)
        scaled = logprobs / self._temperature
        if not self._limited:
            return mx.random.categorical(scaled, key=key)
        ids, values = self._descending(scaled)
        place = mx.random.categorical(self._kept(values), key=key)
        return mx.take_along_axis(ids, place[:, None], axis=-1)[:, 0]

    def _descending(self, scaled: Any) -> tuple[Any, Any]:
        """The ids that top-k leaves and their values, the largest first."""
        if not self._top_k:
            ids = mx.argsort(-scaled, axis=-1)
            return ids, mx.take_along_axis(scaled, ids, axis=-1)
        ids = mx.argpartition(-scaled, kth=self._top_k - 1, axis=-1)[..., : self._top_k]
        values = mx.take_along_axis(scaled, ids, axis=-1)
        order = mx.argsort(-values, axis=-1)
        return mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(values, order, axis=-1)

    def _kept(self, values: Any) -> Any:
        """``values`` with minus infinity where top-p, then min-p, rule out: always a tail, and never all of them."""
        weights = mx.exp(values - values[..., :1])
        kept = weights >= self._min_p
        if self._top_p < 1.0:
            sums = mx.cumsum(weights, axis=-1)
            kept = mx.logical_and(kept, sums - weights < self._top_p * sums[..., -1:])
        return mx.where(kept, values, -mx.inf)


class Bias:
    """Adds to some tokens' logits; minus infinity bars them."""

    def __init__(self, bias: dict[int, float], vocab_size: int) -> None:
        """Every id must be in the vocabulary."""
        values = mx.zeros(vocab_size)
        values[mx.array(list(bias))] = mx.array(list(bias.values()), dtype=mx.float32)
        mx.eval(values)
        self._values = values

    def __call__(self, _tokens: Any, logits: Any) -> Any:
        return logits + self._values


class Penalties:
    """Repetition over prompt and answer (CTRL, arXiv:1909.05858); presence and frequency over the answer, as OpenAI has it.

    Called once a step with all tokens so far, int32 of shape (n,), and logits, f32 of shape (1, vocabulary).
    """

    def __init__(self, params: SamplingParams, prompt: list[int], vocab_size: int, said: list[int]) -> None:
        """Every id of ``prompt`` must be in the vocabulary, and of ``said``, which the answer has already."""
        self._repetition = params.repetition_penalty
        self._presence, self._frequency = params.presence_penalty, params.frequency_penalty
        self._counts = mx.zeros(vocab_size)
        if said:
            self._counts = self._counts.at[mx.array(said)].add(1.0)
        """How often the answer has each token."""
        in_prompt = mx.zeros(vocab_size)
        in_prompt[mx.array(sorted(set(prompt)))] = 1.0
        self._in_prompt = in_prompt > 0
        mx.eval(self._counts, self._in_prompt)
        self._answering = False

    def __call__(self, tokens: Any, logits: Any) -> Any:
        if self._answering:  # the last token is new; at the first call it is the prompt's
            self._counts = self._counts.at[tokens[-1:]].add(1.0)
        self._answering = True
        said = self._counts > 0
        if self._repetition != 1.0:
            damped = mx.where(logits > 0, logits / self._repetition, logits * self._repetition)
            logits = mx.where(mx.logical_or(said, self._in_prompt), damped, logits)
        return logits - (self._frequency * self._counts + self._presence * said)


def _check_ids(bias: dict[int, float], vocab_size: int) -> None:
    for token in bias:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"logit_bias names token {token}, which is not in this model's vocabulary (0 to {vocab_size - 1})",
                param="logit_bias",
            )
