"""What a backend promises of log probabilities: a suite beside ``Conformance``, for backends that give them."""

from __future__ import annotations

import itertools
import math

import pytest

from slimproc.engines.scores import FLOOR
from slimproc.request import Finish
from tests.engines.conformance import PROMPTS
from tests.engines.driver import Engine, Generation

NEAR = {"abs": 2e-3}
"""A token is evaluated alone, in a chunk or beside others: the same but for rounding."""


def own(generation: Generation) -> list[float | None]:
    return [one.logprob for one in generation.logprobs]


class LogprobsConformance:
    """For every backend. A subclass gives the fixture ``open_engine``."""

    @pytest.fixture
    def engine(self, open_engine) -> Engine:
        return open_engine()

    @pytest.mark.parametrize("count", [0, 1, 5, 20])
    def test_every_token_has_one_and_its_alternatives(self, engine, count):
        generation = engine.complete(PROMPTS[0], 12, logprobs=count, ignore_eos=True)
        assert [one.piece for one in generation.logprobs] == generation.pieces
        assert len(generation.logprobs) == generation.usage.completion_tokens == 12
        for one in generation.logprobs:
            assert len(one.top) == count
            values = [logprob for _, logprob in one.top]
            assert values == sorted(values, reverse=True)
            assert all(FLOOR <= value <= 0 for value in [one.logprob, *values])
            assert sum(map(math.exp, values)) <= 1.001

    def test_asking_changes_no_text_and_gives_nothing_to_who_does_not_ask(self, engine):
        plain = engine.complete(PROMPTS[0], 12)
        asking, other = engine.submit(PROMPTS[0], 12, logprobs=3), engine.submit(PROMPTS[0], 12)
        engine.finish()
        assert asking.text == other.text == plain.text
        assert not other.logprobs
        assert asking.logprobs

    def test_they_do_not_depend_on_what_shares_the_batch(self, open_engine):
        alone = open_engine().complete(PROMPTS[0], 12, logprobs=0)
        engine = open_engine()
        others = [engine.submit(prompt, 20) for prompt in PROMPTS[1:3]]
        engine.until_generating(others[-1])
        generation = engine.complete(PROMPTS[0], 12, logprobs=0)
        assert own(generation) == pytest.approx(own(alone), **NEAR)

    def test_offsets_grow_from_the_beginning_of_the_text(self, engine):
        generation = engine.complete(PROMPTS[0], 12, logprobs=0)
        offsets = [one.offset for one in generation.logprobs]
        assert offsets[0] == 0
        assert offsets == sorted(offsets)
        assert offsets[-1] <= len(generation.text)

    def test_a_stop_string_ends_them_with_the_text(self, engine):
        whole = engine.complete(PROMPTS[0], 24, logprobs=0)
        stop = whole.text[5:9]
        generation = engine.complete(PROMPTS[0], 24, stop=(stop,), logprobs=0)
        assert generation.finish is Finish.STOP
        assert all(one.offset < len(generation.text) for one in generation.logprobs)
        assert own(generation) == pytest.approx(own(whole)[: len(generation.logprobs)], **NEAR)
        following = whole.logprobs[len(generation.logprobs)]
        assert following.offset >= len(generation.text)

    # --- the prompt's own -------------------------------------------------------------------------------------

    @pytest.mark.parametrize("prompt", [PROMPTS[2], "x", PROMPTS[5] * 8])
    def test_an_echo_has_one_for_every_token_of_the_prompt_but_the_first(self, engine, prompt):
        generation = engine.complete(prompt, 3, logprobs=2, echo=True, ignore_eos=True)
        tokens = engine.tokens(prompt)
        assert len(generation.logprobs) == len(tokens) + 3
        assert generation.text.startswith(prompt)
        first, *rest = generation.logprobs
        assert (first.logprob, first.top, first.offset) == (None, [], 0)
        assert all(one.logprob is not None and len(one.top) == 2 for one in rest)
        echoed = b"".join(one.piece for one in generation.logprobs[: len(tokens)])
        assert echoed == prompt.encode()
        assert generation.logprobs[len(tokens)].offset == len(prompt)

    def test_an_echo_alone_evaluates_the_prompt_and_says_nothing(self, engine):
        generation = engine.complete(PROMPTS[2], 0, logprobs=1, echo=True)
        assert (generation.text, generation.finish) == (PROMPTS[2], Finish.LENGTH)
        assert generation.usage.completion_tokens == 0
        assert len(generation.logprobs) == generation.usage.prompt_tokens

    def test_an_echo_of_token_ids_has_one_for_each(self, engine):
        prompt = engine.tokens(PROMPTS[2])[:7]
        generation = engine.complete(prompt, 0, logprobs=0, echo=True)
        assert len(generation.logprobs) == 7
        assert generation.text.encode() == b"".join(one.piece for one in generation.logprobs)

    def test_scored_prompts_disturb_nobody_and_can_be_cancelled(self, open_engine):
        alone = [open_engine(context=1024).complete(prompt, 30).text for prompt in PROMPTS[:2]]
        engine = open_engine(context=1024)
        first = engine.submit(PROMPTS[0], 30)
        engine.until_generating(first)
        scored = engine.submit(PROMPTS[2] * 6, 0, logprobs=5, echo=True)
        gone = engine.submit(PROMPTS[2] * 6, 4, logprobs=5, echo=True)
        second = engine.submit(PROMPTS[1], 30)
        engine.step()
        if not gone.ended:
            engine.cancel(gone)
        engine.finish()
        assert [first.text, second.text] == alone
        assert len(scored.logprobs) == scored.usage.prompt_tokens


class ModelLogprobsConformance(LogprobsConformance):
    """What real models promise besides: the values themselves."""

    def test_all_tokens_of_the_vocabulary_sum_to_one(self, engine):
        generation = engine.complete(PROMPTS[0], 4, logprobs=engine.info.vocab_size)
        for one in generation.logprobs:
            assert sum(math.exp(logprob) for _, logprob in one.top) == pytest.approx(1.0, abs=1e-4)

    def test_a_greedy_token_is_its_own_first_alternative(self, engine):
        for one in engine.complete(PROMPTS[0], 12, logprobs=2).logprobs:
            assert one.top[0] == (one.piece, one.logprob)

    @pytest.mark.parametrize(
        "options",
        [{"temperature": 1.7, "seed": 5}, {"top_k": 1, "temperature": 1.0}, {"logit_bias": {40: 100.0}},
         {"repetition_penalty": 1.9}],
    )  # fmt: skip
    def test_they_are_the_models_own_whatever_the_sampler_makes_of_them(self, engine, options):
        plain = engine.complete(PROMPTS[0], 1, logprobs=5).logprobs[0]
        other = engine.complete(PROMPTS[0], 1, logprobs=5, **options).logprobs[0]
        assert [piece for piece, _ in other.top] == [piece for piece, _ in plain.top]
        assert [value for _, value in other.top] == pytest.approx([value for _, value in plain.top], **NEAR)

    def test_a_text_has_the_same_ones_as_a_prompt_that_it_had_as_an_answer(self, engine):
        """So no value belongs to a neighbouring token, and none is missing at a chunk's border."""
        prompt = engine.tokens(PROMPTS[0] * 3)
        answer = engine.complete(prompt, 40, logprobs=3, temperature=1.0, seed=3, ignore_eos=True)
        again = engine.complete([*prompt, *engine.ids(answer)], 0, logprobs=3, echo=True)
        assert own(again)[len(prompt) :] == pytest.approx(own(answer), **NEAR)
        for one, other in zip(again.logprobs[len(prompt) :], answer.logprobs, strict=True):
            assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], **NEAR)

    def test_a_known_prefix_is_evaluated_again_for_them_and_kept_for_others(self, open_engine):
        engine = open_engine(slots=1)
        first = engine.complete(PROMPTS[2], 0, logprobs=0, echo=True)
        second = engine.complete(PROMPTS[2], 0, logprobs=0, echo=True)
        assert first.usage.cached_tokens == second.usage.cached_tokens == 0
        assert own(second)[1:] == pytest.approx(own(first)[1:], **NEAR)
        assert engine.complete(PROMPTS[2], 2).usage.cached_tokens == len(engine.tokens(PROMPTS[2])) - 1

    def test_every_slot_can_score_a_prompt_at_once(self, open_engine):
        engine = open_engine(slots=4, context=512)
        prompts = [PROMPTS[2] * (1 + place) for place in range(4)]
        alone = [open_engine(slots=1, context=512).complete(prompt, 0, logprobs=1, echo=True) for prompt in prompts]
        together = [engine.submit(prompt, 0, logprobs=1, echo=True) for prompt in prompts]
        engine.finish()
        for one, other in itertools.zip_longest(together, alone):
            assert own(one)[1:] == pytest.approx(own(other)[1:], **NEAR)
