"""The samplers draw what their definitions say, checked against numpy on many draws and on exact supports."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from slimproc.engines.mlx.sampling import make_processors, make_sampler
from slimproc.errors import InvalidRequest
from slimproc.request import SamplingParams

LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.5, -8.0], np.float32)
SIZE = len(LOGITS)


def normalized(logits: np.ndarray) -> mx.array:
    row = mx.array(logits)[None]
    return row - mx.logsumexp(row, axis=-1, keepdims=True)


def draws(count: int = 400, **params) -> list[int]:
    sampler = make_sampler(SamplingParams(**{"seed": 1, **params}), SIZE)
    return [int(sampler(normalized(LOGITS)).item()) for _ in range(count)]


@pytest.mark.parametrize(
    ("params", "left"),
    [
        ({"top_k": 3}, {0, 6, 1}),
        ({"top_k": 1}, {0}),
        ({"top_p": 0.1}, {0}),
        ({"top_p": 0.6}, {0, 6}),
        ({"min_p": 0.3}, {0, 6, 1}),
        ({"min_p": 5.0}, {0}),
        ({"top_k": 3, "top_p": 0.6}, {0, 6}),
        ({"top_p": 0.95, "min_p": 0.3, "top_k": 5}, {0, 6, 1}),
        ({"temperature": 0.05}, {0}),
    ],
    ids=str,
)
def test_limits_leave_exactly_the_tokens_that_they_name(params, left):
    assert set(draws(200, **params)) == left


@pytest.mark.parametrize("params", [{}, {"temperature": 2.0}, {"top_p": 0.9999999}, {"top_k": SIZE + 5}], ids=str)
def test_draws_are_as_frequent_as_the_softmax_says(params):
    weights = np.exp(LOGITS / params.get("temperature", 1.0))
    found = np.bincount(draws(2000, **params), minlength=SIZE) / 2000
    assert np.abs(found - weights / weights.sum()).max() < 0.05


def test_a_tiny_temperature_is_greedy():
    assert make_sampler(SamplingParams(temperature=0.0), SIZE) is None
    assert make_sampler(SamplingParams(temperature=1e-9), SIZE) is None


def test_a_seed_repeats_and_none_does_not():
    assert draws(50, seed=-3) == draws(50, seed=-3)
    assert draws(50, seed=-3) != draws(50, seed=4)
    assert draws(50, seed=None) != draws(50, seed=None)


def applied(
    params: SamplingParams, prompt: list[int], answer: list[int], barred: frozenset[int] = frozenset()
) -> np.ndarray:
    """The logits after each of the calls that a generator makes, for the last of them."""
    processors = make_processors(params, prompt, SIZE, barred)
    row = mx.array(LOGITS)[None]
    for length in range(len(answer) + 1):
        row = mx.array(LOGITS)[None]
        for processor in processors:
            row = processor(mx.array([*prompt, *answer[:length]], dtype=mx.int32), row)
    return np.array(row)[0]


def test_penalties_count_the_answer_and_repetition_the_prompt_as_well():
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    expected = LOGITS.copy()
    expected[[0, 1]] /= 2.0  # in the prompt, and positive
    expected[4] *= 2.0  # in the answer, and negative
    expected[4] -= 0.5 + 2 * 0.25
    expected[6] = expected[6] / 2.0 - 0.75
    np.testing.assert_allclose(applied(params, [0, 1, 1], [4, 6, 4]), expected, rtol=1e-6)


def test_a_bias_is_added_and_what_is_barred_never_comes():
    params = SamplingParams(logit_bias={2: 5.0, 3: -100.0, 0: 9.0})
    expected = LOGITS.copy()
    expected[2] += 5.0
    expected[3] -= 100.0
    expected[0] = -np.inf
    np.testing.assert_allclose(applied(params, [1], [], frozenset({0, 99})), expected, rtol=1e-6)


def test_nothing_asked_for_costs_nothing():
    assert make_processors(SamplingParams(), [1], SIZE, frozenset()) == []


@pytest.mark.parametrize("token", [-1, SIZE, 10**9])
def test_a_bias_outside_the_vocabulary_is_refused(token):
    with pytest.raises(InvalidRequest, match="logit_bias"):
        make_processors(SamplingParams(logit_bias={token: 1.0}), [1], SIZE, frozenset())
