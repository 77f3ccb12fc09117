"""Log probabilities of llama.cpp: rows of logits that belong to the right tokens, and not too many of them at once."""

from __future__ import annotations

import math

import pytest

from slimproc.engines.prompt_scores import SCORED_ROWS
from slimproc.engines.scores import FLOOR
from tests.broken_models import with_nan_weights
from tests.models import HELLO


def test_a_prompt_is_scored_in_chunks_that_bound_the_rows_of_logits(open_engine, monkeypatch):
    engine = open_engine()
    rows: list[int] = []
    real = engine.backend._batch.fill
    monkeypatch.setattr(engine.backend._batch, "fill", lambda *columns: (rows.append(sum(columns[3])), real(*columns)))
    scored = [engine.submit("a long prompt " * 9, 2, logprobs=1, echo=True, ignore_eos=True) for _ in range(3)]
    engine.finish()
    assert max(rows) <= SCORED_ROWS + 3
    assert len(rows) > len(scored[0].sequence.prompt) * 3 // SCORED_ROWS
    for generation in scored:
        assert len(generation.logprobs) == len(generation.sequence.prompt) + 2


def test_a_bos_is_a_token_of_the_echo_without_text(open_engine):
    engine = open_engine("bos.gguf")
    generation = engine.complete("hey", 0, logprobs=0, echo=True)
    assert [(one.piece, one.offset) for one in generation.logprobs] == [(b"", 0), (b"h", 0), (b"e", 1), (b"y", 2)]
    assert generation.text == "hey"
    written = engine.complete("<|im_start|>hey", 0, logprobs=0, echo=True)
    assert written.text == "<|im_start|>hey"
    assert [one.piece for one in written.logprobs] == [b"<|im_start|>", b"h", b"e", b"y"]


def test_a_scripted_model_is_sure_of_every_piece_even_of_half_characters_and_of_its_end(open_engine):
    engine = open_engine("scripted.gguf")
    generation = engine.complete("hi", 40, logprobs=2)
    assert [one.piece for one in generation.logprobs] == HELLO
    assert all(math.exp(one.logprob) > 0.99 for one in generation.logprobs)
    # The end is an alternative like any other, under its own name.
    last = engine.complete("hi", 40, logprobs=2, ignore_eos=True).logprobs[len(HELLO)]
    assert last.top[0][0] == b"<|im_end|>"
    assert math.exp(last.top[0][1]) > 0.99


def test_a_token_that_the_sampler_was_forced_to_shows_the_models_own_value(open_engine):
    engine = open_engine("scripted.gguf")
    token = engine.tokens("Z")[-1]
    (one,) = engine.complete("hi", 1, logprobs=1, logit_bias={token: 100.0}).logprobs
    assert one.piece == b"Z"
    assert one.logprob < -5
    assert one.top[0][0] == HELLO[0]


@pytest.mark.parametrize("bias", [{}, {65: 100.0}])
def test_a_model_of_nan_scores_a_prompt_with_the_floor_and_fails_the_answer(open_engine, models, tmp_path, bias):
    engine = open_engine(with_nan_weights(tmp_path / "nan.gguf", models / "tiny.gguf"))
    scored = engine.complete("abc", 0, logprobs=2, echo=True)
    assert [one.logprob for one in scored.logprobs] == [None, FLOOR, FLOOR]
    assert engine.complete("abc", 4, logprobs=2, logit_bias=bias).failure
