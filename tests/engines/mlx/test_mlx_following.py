"""Log probabilities and grammars: the model's own numbers, and only what the grammar allows, beside other sequences."""

from __future__ import annotations

import json
import re

import pytest

from slimproc.engines.grammar.matcher import GrammarError, GrammarMatcher
from slimproc.engines.sequence import Sequence
from slimproc.ipc.wire import Submit
from slimproc.request import Finish, SamplingParams
from tests.engines.conformance import PROMPTS
from tests.engines.driver import Engine, Generation
from tests.models import skip_without_llama_cpp


def guided(engine: Engine, matcher: GrammarMatcher, max_tokens: int = 60, **sampling) -> Generation:
    """Submit a sequence that follows ``matcher``."""
    command = Submit(
        rid=1000 + len(engine._running), prompt=PROMPTS[0], max_tokens=max_tokens, sampling=SamplingParams(**sampling)
    )
    sequence = Sequence(command, engine.tokens(PROMPTS[0]), engine.info.context)
    sequence.grammar = matcher
    engine.backend.add(sequence)
    generation = engine._running[sequence.rid] = Generation(sequence)
    return generation


@pytest.fixture
def matcher():
    """``matcher(engine, regex)``, compiled from the backend's own vocabulary."""
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    from llguidance import LLMatcher  # noqa: PLC0415  # only where it is installed

    from slimproc.engines.grammar import library  # noqa: PLC0415  # the same

    def make(engine: Engine, regex: str) -> GrammarMatcher:
        tokenizer = library.make_tokenizer(engine.backend.grammar_vocabulary())
        return GrammarMatcher(LLMatcher(tokenizer, LLMatcher.grammar_from_regex(regex)), engine.info.vocab_size)

    return make


def test_log_probabilities_are_those_of_llama_cpp(open_mlx, random_model):
    skip_without_llama_cpp()
    options = {"logprobs": 3, "max_tokens": 20, "ignore_eos": True, "logit_bias": {70: 3.0}, "frequency_penalty": 1.0}
    ours = open_mlx(random_model).complete(PROMPTS[0], **options)
    theirs = open_mlx(random_model.with_suffix(".gguf"), backend="llama_cpp").complete(PROMPTS[0], **options)
    assert len(ours.logprobs) == len(theirs.logprobs) == 20
    for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=0.02)
        assert [name for name, _ in mine.top] == [name for name, _ in other.top]
        assert [value for _, value in mine.top] == pytest.approx([value for _, value in other.top], abs=0.02)


def test_log_probabilities_are_the_models_whatever_was_drawn_beside_others(open_mlx, random_model):
    engine = open_mlx(random_model)
    options = {"temperature": 1.5, "seed": 4, "top_k": 50}
    others = [engine.submit(prompt, 30, logprobs=0) for prompt in PROMPTS[1:3]]
    asked = engine.submit(PROMPTS[0], 12, logprobs=260, **options)
    engine.finish()
    assert asked.text == open_mlx(random_model).complete(PROMPTS[0], 12, **options).text
    for one in asked.logprobs:
        assert one.logprob in [value for _, value in one.top], "its own is among all of them"
    assert all(not one.top for other in others for one in other.logprobs)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 2, "top_p": 0.9}], ids=str)
def test_an_answer_follows_its_grammar_and_ends_with_it(open_mlx, random_model, matcher, sampling):
    engine = open_mlx(random_model)
    alone = open_mlx(random_model).complete(PROMPTS[3], 40).text
    beside = engine.submit(PROMPTS[3], 40)
    answer = guided(engine, matcher(engine, r'\{"id": [0-9]{3}\}'), **sampling)
    engine.finish()
    assert answer.finish is Finish.STOP
    assert re.fullmatch(r'\{"id": \d{3}\}', answer.text)
    assert json.loads(answer.text)["id"] < 1000
    assert beside.text == alone


def test_an_ignored_end_comes_only_where_nothing_else_may(open_mlx, random_model, matcher):
    engine = open_mlx(random_model)
    answer = guided(engine, matcher(engine, "(ab)+"), 9, temperature=0.0, ignore_eos=True)
    engine.finish()
    assert (answer.text, answer.finish) == ("ababababa", Finish.LENGTH)


def test_a_limit_inside_a_grammar_says_length(open_mlx, random_model, matcher):
    engine = open_mlx(random_model)
    answer = guided(engine, matcher(engine, "[0-9]{20}"), 5, temperature=0.0)
    engine.finish()
    assert (len(answer.text), answer.finish) == (5, Finish.LENGTH)


@pytest.mark.parametrize("when", [1, 3], ids=["at its first mask", "later"])
def test_a_grammar_that_breaks_fails_its_own_sequence_alone(open_mlx, random_model, matcher, monkeypatch, when):
    engine = open_mlx(random_model)
    beside = engine.submit(PROMPTS[3], 30, ignore_eos=True)
    broken = matcher(engine, "[0-9]{20}")
    calls = iter(range(1, 100))
    mask = GrammarMatcher.mask

    def breaks(self):
        if next(calls) == when:
            raise GrammarError("too hard")
        return mask(self)

    monkeypatch.setattr(GrammarMatcher, "mask", breaks)
    answer = guided(engine, broken, temperature=0.0)
    engine.finish()
    assert answer.failure == "the grammar cannot be followed any further: too hard"
    assert beside.usage.completion_tokens == 30
