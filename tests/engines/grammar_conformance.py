"""What a backend that follows grammars promises; for random weights on a vocabulary of bytes (``tests/models.py``)."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from slimproc.engines.grammar import library
from slimproc.engines.grammar.matcher import GrammarError, GrammarMatcher
from slimproc.request import Finish, GrammarSpec
from tests.engines.driver import Engine
from tests.grammars import PERSON, schema, valid

PROMPT = "A person, as JSON: "
CHOSEN = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5},
    "limited": {"temperature": 1.0, "seed": 6, "top_p": 0.8, "top_k": 40, "min_p": 0.01},
    "penalized": {"temperature": 1.0, "seed": 7, "presence_penalty": 1.0, "repetition_penalty": 1.3},
    "end ignored": {"ignore_eos": True},
}


class GrammarConformance:
    """A subclass gives the fixture ``open_engine``, as for ``Conformance``."""

    @pytest.fixture
    def engine(self, open_engine) -> Engine:
        return open_engine()

    @pytest.fixture
    def matcher(self, engine) -> Callable[[GrammarSpec], GrammarMatcher]:
        vocabulary = engine.backend.grammar_vocabulary()
        tokenizer = library.make_tokenizer(vocabulary)

        def make(spec: GrammarSpec) -> GrammarMatcher:
            return GrammarMatcher(library.compile_grammar(tokenizer, library.translate(spec)), len(vocabulary.tokens))

        return make

    def test_its_vocabulary_is_as_wide_as_its_logits_and_spells_what_it_tokenizes(self, engine):
        vocabulary = engine.backend.grammar_vocabulary()
        assert len(vocabulary.tokens) == engine.info.vocab_size
        text = 'x{"é": 🙂}'
        tokens = engine.backend.tokenize(text, add_special=False, parse_special=False)
        assert b"".join(vocabulary.tokens[token] for token in tokens) == text.encode()

    @pytest.mark.parametrize("how", CHOSEN)
    def test_a_finished_answer_is_what_the_schema_allows(self, engine, matcher, how):
        for number in range(3):
            generation = engine.complete(PROMPT * (number + 1), None, grammar=matcher(schema(PERSON)), **CHOSEN[how])
            assert generation.finish is Finish.STOP
            assert valid(generation.text, PERSON), generation.text

    def test_a_bias_moves_the_choice_and_not_the_grammar(self, engine, matcher):
        (wanted,) = engine.tokens("c")[-1:]
        (outside,) = engine.tokens("z")[-1:]
        bias = {"logit_bias": {wanted: 100.0, outside: 100.0}}
        assert engine.complete(PROMPT, 8, grammar=matcher(GrammarSpec("regex", "[abc]{4}", "p")), **bias).text == "cccc"

    def test_an_answer_that_is_cut_off_says_length(self, engine, matcher):
        for limit in (1, 3):
            generation = engine.complete(PROMPT, limit, grammar=matcher(schema({"type": "object"})))
            assert generation.finish is Finish.LENGTH
            assert generation.usage.completion_tokens == limit

    def test_an_answer_that_is_complete_with_its_last_token_says_stop(self, engine, matcher):
        generation = engine.complete(PROMPT, 3, grammar=matcher(GrammarSpec("regex", "[a-z]{3}", "p")))
        assert (generation.finish, generation.usage.completion_tokens) == (Finish.STOP, 3)

    @pytest.mark.parametrize("ignore", [False, True])
    def test_a_grammar_of_nothing_is_an_empty_answer(self, engine, matcher, ignore):
        generation = engine.complete(PROMPT, 5, grammar=matcher(GrammarSpec("regex", "", "p")), ignore_eos=ignore)
        assert (generation.text, generation.finish, generation.failure) == ("", Finish.STOP, None)

    def test_an_end_that_is_ignored_comes_only_where_nothing_else_can(self, engine, matcher):
        generation = engine.complete(
            PROMPT, 30, grammar=matcher(GrammarSpec("regex", "[ab]{0,20}", "p")), ignore_eos=True
        )
        assert (generation.finish, len(generation.text)) == (Finish.STOP, 20)

    def test_a_seed_gives_the_same_answer_again(self, engine, matcher):
        texts = {
            engine.complete(PROMPT, 40, grammar=matcher(schema(PERSON)), temperature=1.0, seed=9).text for _ in range(3)
        }
        assert len(texts) == 1

    def test_two_grammars_and_none_share_a_batch_as_if_each_were_alone(self, open_engine, engine, matcher):
        words = GrammarSpec("grammar", 'start: (WORD " ")+\nWORD: /[a-z]{2,6}/', "p")
        wanted = [(schema(PERSON), {}), (words, {}), (None, {}), (None, {"temperature": 1.0, "seed": 3})]
        alone = [
            engine.complete(PROMPT, 30, grammar=spec and matcher(spec), **options).text for spec, options in wanted
        ]
        together = [engine.submit(PROMPT, 30, grammar=spec and matcher(spec), **options) for spec, options in wanted]
        engine.finish()
        assert [generation.text for generation in together] == alone
        assert alone[2] == open_engine().complete(PROMPT, 30).text

    def test_an_error_of_the_matcher_fails_its_sequence_and_no_other(self, engine, matcher, monkeypatch):
        alone = engine.complete(PROMPT, 20).text
        good, other = matcher(schema(PERSON)), engine.submit(PROMPT, 20)
        failing = _Failing(matcher(schema(PERSON)), 3)
        failed, fine = engine.submit(PROMPT, 60, grammar=failing), engine.submit(PROMPT, None, grammar=good)
        engine.finish()
        assert "grammar" in failed.failure
        assert "no more" in failed.failure
        assert other.text == alone
        assert valid(fine.text, PERSON)

    def test_every_choice_is_literally_one_of_them(self, engine, matcher):
        choices = ["yes", "no", "mäybe 🙂"]
        spec = GrammarSpec("choice", json.dumps(choices), "p")
        texts = [engine.complete(PROMPT, None, grammar=matcher(spec), temperature=2.0).text for _ in range(6)]
        assert set(texts) <= set(choices)

    def test_the_models_log_probabilities_come_with_it(self, engine, matcher):
        if not getattr(engine.backend, "gives_logprobs", False):
            pytest.skip("it gives none")
        generation = engine.complete(PROMPT, 9, grammar=matcher(GrammarSpec("regex", "[ab]{4}", "p")), logprobs=1)
        assert generation.failure is None
        assert len(generation.text) == 4


class _Failing:
    """A matcher whose mask fails after some tokens."""

    def __init__(self, matcher: GrammarMatcher, after: int) -> None:
        self._matcher = matcher
        self._left = after

    def mask(self) -> np.ndarray:
        self._left -= 1
        if self._left < 0:
            raise GrammarError("no more")
        return self._matcher.mask()

    def accept(self, token: int) -> None:
        self._matcher.accept(token)

    @property
    def stopped(self) -> bool:
        return self._matcher.stopped
