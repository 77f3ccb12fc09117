"""Log probabilities from logits, against the formula in double precision."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slimproc.engines.logprobs import likeliest, log_softmax, score


@pytest.fixture
def row():
    return (np.random.default_rng(3).standard_normal(5000) * 9).astype(np.float32)


def exact(row):
    wide = row.astype(np.float64)
    return wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())


def test_probabilities_sum_to_one_and_the_row_stays_as_it_was(row):
    before = row.copy()
    logprobs = log_softmax(row)
    assert np.exp(logprobs.astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-5)
    np.testing.assert_allclose(logprobs, exact(row), atol=1e-5)
    np.testing.assert_array_equal(row, before)


def test_large_logits_and_ruled_out_tokens_are_no_trouble():
    logprobs = log_softmax(np.array([3e4, 3e4, -np.inf, -3e4], np.float32))
    np.testing.assert_allclose(logprobs[:2], math.log(0.5), atol=1e-6)
    assert logprobs[2] == -np.inf


def test_a_row_without_a_largest_value_is_nan_throughout():
    for bad in (np.nan, np.inf):
        assert np.isnan(log_softmax(np.array([0.0, bad], np.float32))).all()


@pytest.mark.parametrize("count", [0, 1, 5, 20, 4999, 5000, 6000])
def test_the_likeliest_come_first(row, count):
    expected = sorted(range(len(row)), key=lambda token: (-row[token], token))[:count]
    assert likeliest(row, count) == expected


def test_a_score_names_the_token_and_its_alternatives(row):
    best = int(row.argmax())
    its = score(row, 7, b"seven", 2, lambda token: b"%d" % token)
    assert its.piece == b"seven"
    assert its.logprob == pytest.approx(exact(row)[7], abs=1e-4)
    assert its.top[0] == (b"%d" % best, pytest.approx(exact(row)[best], abs=1e-5))
    assert len(its.top) == 2
    assert isinstance(its.logprob, float)
