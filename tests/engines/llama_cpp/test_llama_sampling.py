"""Tokens are drawn from the distribution that the parameters describe: compared with a plain reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimproc.engines.llama_cpp.drawing import draw, draw_limited, draw_mostly_inside, shortlist
from slimproc.engines.llama_cpp.sampling import NoChoiceError, Sampler
from slimproc.errors import InvalidRequest
from slimproc.request import SamplingParams

NO_ENDS = np.array([], np.int64)


def sampler(vocab=1000, prompt=(), ends=NO_ENDS, **params):
    return Sampler(SamplingParams(**params), list(prompt), vocab, ends)


def logits(seed, vocab=1000, scale=3.0):
    return (np.random.default_rng(seed).standard_normal(vocab) * scale).astype(np.float32)


def reference(row, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities by the textbook: one token at a time, heaviest first, lower ids first among equals."""
    weights = [math.exp((float(value) - float(row.max())) / temperature) for value in row]
    order = sorted(range(len(row)), key=lambda token: (-weights[token], token))
    kept = order[:top_k] if top_k else order
    target, running, nucleus = top_p * sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        nucleus.append(token)
        running += weights[token]
        if running >= target:
            break
    if top_p < 1.0:
        kept = nucleus
    kept = [token for token in kept if weights[token] >= min_p * weights[order[0]]]
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


LIMITS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.7, "top_k": 5},
    {"top_k": 1},
    {"top_k": 5000},
    {"top_p": 0.9},
    {"top_p": 0.5, "temperature": 2.0},
    {"top_p": 0.0},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_draws_have_the_reference_distribution(limits, scale):
    """Each id takes exactly its share of the chances from 0 to 1, so evenly spread chances count it out."""
    row = logits(1, scale=scale)
    expected = reference(row, **limits)
    params = SamplingParams(**limits)
    weights = np.exp((row - row.max()) / np.float32(params.temperature))
    plain = not (params.top_k or params.top_p < 1 or params.min_p)
    spread = 4000
    drawn = [
        draw(weights, chance) if plain else draw_limited(weights, params, chance)
        for chance in (np.arange(spread) + 0.5) / spread
    ]
    assert set(drawn) <= set(expected)
    counts = np.bincount(drawn, minlength=len(row))
    for token, share in expected.items():
        assert abs(counts[token] - share * spread) <= 1.5


@given(st.integers(0, 10**6), st.integers(1, 700), st.sampled_from(LIMITS), st.floats(0, 1, exclude_max=True))
def test_no_draw_falls_outside_what_the_limits_leave(seed, vocab, limits, chance):
    row = np.round(logits(seed, vocab), 1)  # rounded: many equal weights
    params = SamplingParams(**{**limits, "top_k": min(limits.get("top_k", 0), vocab)})
    weights = np.exp((row - row.max()) / np.float32(params.temperature))
    assert weights[draw(weights, chance)] > 0
    # f32 sums can put a token more or less at the very border of top_p; a little slack there, none elsewhere.
    slack = {**limits, "top_p": min(1.0, params.top_p + 1e-5)}
    assert draw_limited(weights, params, chance) in reference(row, **slack)


NUCLEI = [{"top_p": 0.9}, {"top_p": 0.7, "temperature": 2.0}, {"min_p": 0.3}, {"top_p": 0.95, "min_p": 0.01}]


@pytest.mark.parametrize("limits", NUCLEI, ids=str)
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_drawing_again_what_falls_outside_gives_the_same_distribution(limits, scale):
    """Shares of 20,000 draws with a fixed seed, each within five standard deviations."""
    row = logits(2, vocab=60, scale=scale)
    expected = reference(row, **limits)
    params = SamplingParams(**limits)
    weights = np.exp((row - row.max()) / np.float32(params.temperature))
    random, draws = np.random.default_rng(3).random, 20_000
    counts = np.bincount([draw_mostly_inside(weights, params, random) for _ in range(draws)], minlength=len(row))
    for token, count in enumerate(counts):
        share = expected.get(token, 0.0)
        assert abs(count - share * draws) <= 5 * math.sqrt(share * (1 - share) * draws)


@given(st.integers(0, 10**6), st.integers(1, 700), st.sampled_from(NUCLEI), st.floats(0, 1, exclude_max=True))
def test_no_draw_is_kept_that_is_outside(seed, vocab, limits, chance):
    row = np.round(logits(seed, vocab), 1)
    params = SamplingParams(**limits)
    weights = np.exp((row - row.max()) / np.float32(params.temperature))
    slack = {**limits, "top_p": min(1.0, params.top_p + 1e-5)}
    assert draw_mostly_inside(weights, params, lambda: chance) in reference(row, **slack)


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 3000), st.booleans())
def test_a_shortlist_holds_all_that_top_k_may_choose_and_is_short(seed, top_k, barred, rounded):
    row = logits(seed, vocab=10_000 + seed % 3000)
    row = np.round(row, 1) if rounded else row
    row[np.random.default_rng(seed).permutation(len(row))[: 4 * barred]] = -np.inf
    ids = shortlist(row, top_k)
    if ids is None:
        assert len(row) < 2 * top_k * 256 or not np.isfinite(row.max())
        return
    weights = np.exp(row - row.max())
    assert set(reference(row, top_k=top_k)) - set(np.flatnonzero(weights == 0)) <= set(ids)
    assert np.array_equal(ids, np.unique(ids))
    assert np.isfinite(row[ids]).all()


def test_top_k_of_a_large_vocabulary_draws_as_from_the_whole():
    row = logits(7, vocab=50_000)
    params = SamplingParams(top_k=40, top_p=0.9, seed=5)
    chances = np.random.Generator(np.random.PCG64(5)).random
    one = Sampler(params, [], len(row), NO_ENDS)
    weights = np.exp(row - row.max())
    assert [one.choose(row) for _ in range(200)] == [draw_limited(weights, params, chances()) for _ in range(200)]


@pytest.mark.parametrize("chance", [0.0, 0.5, np.nextafter(1.0, 0.0)])
def test_tokens_ruled_out_are_never_drawn_not_even_at_the_ends(chance):
    weights = np.zeros(1000, np.float32)
    weights[[300, 301, 700]] = 0.5, 1.0, 1e-30
    assert draw(weights, chance) in {300, 301, 700}
    assert draw_limited(weights, SamplingParams(top_p=0.999), chance) in {300, 301}


def test_equal_logits_are_cut_by_id():
    row = np.zeros(1000, np.float32)
    chances = (np.arange(50) + 0.5) / 50
    assert {draw_limited(np.exp(row), SamplingParams(top_k=5), chance) for chance in chances} == set(range(5))


def test_greedy_takes_the_lowest_of_equals():
    row = np.zeros(1000, np.float32)
    row[[70, 30, 500]] = 2.0
    assert sampler(temperature=0, ignore_eos=True).choose(row) == 30


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-6])
def test_a_tiny_temperature_is_greedy_and_draws_no_infinities(temperature):
    row = logits(3)
    assert sampler(temperature=temperature, top_p=0.9).choose(row) == int(row.argmax())


def test_the_rows_of_a_batch_are_left_as_they_are():
    row = logits(4)
    before = row.copy()
    sampler(seed=1, logit_bias={3: 5.0}, repetition_penalty=1.5, prompt=[1, 2], top_p=0.9).choose(row)
    assert np.array_equal(row, before)


def test_equal_seeds_draw_equal_tokens_and_the_draws_go_on():
    rows = [logits(seed, scale=0.1) for seed in range(20)]
    first, second, third = (
        [one.choose(row) for row in rows] for one in (sampler(seed=9), sampler(seed=9), sampler(seed=8))
    )
    assert first == second != third
    assert len(set(first)) > 10


def test_openais_penalties_look_at_the_answer_only():
    one = sampler(temperature=0, presence_penalty=0.5, frequency_penalty=0.25, prompt=[7])
    row = np.zeros(1000, np.float32)
    row[[7, 8]] = 1.0
    row[9] = 0.4
    chosen = []
    for _ in range(6):
        chosen.append(one.choose(row))
        one.accept(chosen[-1])
    # 7: 1 - .75 = .25; 8 likewise; 9: .4 - .75; then 7: .25 - .25 = 0, and so on.
    assert chosen[:5] == [7, 8, 9, 7, 8]
    assert chosen[5] == 0


def test_penalties_of_opposite_sign_are_both_applied_once_a_token():
    one = sampler(temperature=0, presence_penalty=0.5, frequency_penalty=-0.5)
    row = np.array([1.0, 0.9] + [0.0] * 998, np.float32)
    for _ in range(3):
        assert one.choose(row) == 0  # -0.5 once, +0.5 each time
        one.accept(0)


def test_the_repetition_penalty_looks_at_the_prompt_too_and_always_lowers():
    one = sampler(temperature=0, repetition_penalty=2.0, prompt=[1, 2])
    row = np.full(1000, -5.0, np.float32)
    row[[1, 2, 3]] = 4.0, -1.0, 2.5
    assert one.choose(row) == 3  # 4 / 2 = 2 and -1 * 2 = -2
    row[3] = -1.5
    row[1] = -4.0
    assert one.choose(row) == 3


def test_penalties_hold_more_tokens_than_they_began_with():
    one = sampler(temperature=0, presence_penalty=1.0)
    for token in range(500):
        one.accept(token)
    row = np.full(1000, 0.5, np.float32)
    assert one.choose(row) == 500


def test_a_bias_is_added_and_an_end_can_be_barred():
    row = logits(5)
    assert sampler(temperature=0, logit_bias={17: 100.0}).choose(row) == 17
    best = int(row.argmax())
    assert sampler(temperature=0, ends=np.array([best]), ignore_eos=True).choose(row) != best
    assert sampler(temperature=0, ends=np.array([best])).choose(row) == best


@pytest.mark.parametrize("token", [-1, 1000, 10**12])
def test_a_bias_outside_the_vocabulary_is_the_callers_fault(token):
    with pytest.raises(InvalidRequest) as refusal:
        sampler(logit_bias={token: 1.0})
    assert refusal.value.param == "logit_bias"


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_p": 0.5}], ids=str)
@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_logits_without_a_choice_say_so(params, value):
    with pytest.raises(NoChoiceError):
        sampler(**params, ignore_eos=True).choose(np.full(1000, value, np.float32))


def test_a_single_nan_is_not_passed_over():
    row = logits(6, vocab=10_000)
    row[500] = np.nan
    for params in ({"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.9}):
        with pytest.raises(NoChoiceError):
            sampler(10_000, **params).choose(row)
