"""What real models promise besides ``Conformance``: seeds, penalties, biases, and prefixes that are not evaluated twice."""

from __future__ import annotations

import math

import pytest

from slimproc.errors import InvalidRequest
from slimproc.ipc.wire import Said
from slimproc.request import Finish
from tests.engines.conformance import PROMPTS, Conformance
from tests.engines.driver import Engine, Generation


class SamplingConformance(Conformance):
    """A subclass gives the fixture ``open_engine``."""

    evaluated_ahead = 0
    """Whether a backend has evaluated an answer's last token, too, by the time it gives it out."""

    def test_a_seed_gives_the_same_text_whatever_shares_the_batch_and_after_a_restart(self, open_engine):
        options = {"temperature": 1.0, "seed": 7}
        engine = open_engine()
        texts = {engine.complete(PROMPTS[0], 20, **options).text}
        for others in range(3):
            for number in range(others):
                engine.submit(PROMPTS[1 + number], 25, temperature=1.0)
            generation = engine.submit(PROMPTS[0], 20, **options)
            engine.finish()
            texts.add(generation.text)
        texts.add(open_engine(slots=2).complete(PROMPTS[0], 20, **options).text)
        assert len(texts) == 1

    def test_seeds_differ_from_one_another(self, engine):
        assert len({engine.complete(PROMPTS[0], 20, temperature=1.0, seed=seed).text for seed in range(5)}) == 5

    def test_negative_and_huge_seeds_are_seeds(self, engine):
        for seed in (-1, 2**63 - 1):
            first, second = (engine.complete(PROMPTS[0], 12, temperature=1.0, seed=seed).text for _ in range(2))
            assert first == second

    def test_an_omitted_seed_differs_every_time_and_in_every_engine(self, open_engine):
        texts = [open_engine().complete(PROMPTS[0], 20, temperature=1.0).text for _ in range(3)]
        engine = open_engine()
        texts += [engine.complete(PROMPTS[0], 20, temperature=1.0).text for _ in range(3)]
        assert len(set(texts)) == 6

    def test_a_callers_seed_does_not_become_the_default(self, open_engine):
        texts = []
        for _ in range(2):
            engine = open_engine()
            engine.complete(PROMPTS[0], 8, temperature=1.0, seed=3)
            texts.append(engine.complete(PROMPTS[0], 20, temperature=1.0).text)
        assert texts[0] != texts[1]

    def test_a_reused_prefix_changes_no_text(self, open_engine):
        base = "You are a helpful assistant. " * 4
        prompts = [base + "First question", base + "Second", "Something else", base + "First question", base]
        fresh = [open_engine().complete(prompt, 16).text for prompt in prompts]
        engine = open_engine(slots=2)
        answers = [engine.complete(prompt, 16) for prompt in prompts]
        assert [answer.text for answer in answers] == fresh
        assert answers[0].usage.cached_tokens == 0
        assert answers[3].usage.cached_tokens >= len(base) - 1

    def test_at_least_one_token_of_a_known_prompt_is_evaluated(self, engine):
        first, second = (engine.complete(PROMPTS[0] * 2, 6) for _ in range(2))
        assert second.text == first.text
        assert second.usage.cached_tokens == second.usage.prompt_tokens - 1

    def test_a_conversation_goes_on_from_what_was_generated(self, engine):
        prompt = engine.tokens(PROMPTS[2])
        answer = engine.complete(prompt, 20, ignore_eos=True)
        evaluated = len(prompt) + 19 + self.evaluated_ahead
        again = engine.complete([*prompt, *engine.ids(answer), 5, 6, 7], 4)
        assert again.usage.cached_tokens == evaluated

    def test_replicas_give_the_same_text_to_a_seed_whatever_each_of_them_does_beside(self, open_engine):
        replicas = [open_engine(), open_engine(slots=2)]
        busy = replicas[0].submit(PROMPTS[3], 25, temperature=1.0)
        replicas[0].until_generating(busy)
        answers = [replica.submit(PROMPTS[0], 20, temperature=0.8, top_p=0.9, seed=11) for replica in replicas]
        for _ in range(60):
            for replica in replicas:
                replica.step()
        assert all(answer.ended for answer in answers)
        assert answers[0].text == answers[1].text

    def test_ignore_eos_goes_on_to_the_limit_where_the_model_would_have_ended(self, engine):
        (end,) = engine.backend.tokenize(engine.info.eos_token, add_special=False, parse_special=True)
        ended = engine.complete(PROMPTS[0], 9, logit_bias={end: 100.0})
        assert (ended.text, ended.finish, ended.usage.completion_tokens) == ("", Finish.STOP, 0)
        going = engine.complete(PROMPTS[0], 9, logit_bias={end: 100.0}, ignore_eos=True)
        assert (going.finish, going.usage.completion_tokens) == (Finish.LENGTH, 9)

    @pytest.mark.parametrize(
        "penalty", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 1.9}]
    )
    def test_penalties_change_what_is_said_and_neutral_ones_do_not(self, engine, penalty):
        neutral = dict.fromkeys(penalty, 1.0 if "repetition_penalty" in penalty else 0.0)
        plain = [engine.complete(prompt, 40, ignore_eos=True).text for prompt in PROMPTS[:3]]
        assert [engine.complete(prompt, 40, ignore_eos=True, **neutral).text for prompt in PROMPTS[:3]] == plain
        assert [engine.complete(prompt, 40, ignore_eos=True, **penalty).text for prompt in PROMPTS[:3]] != plain

    @pytest.mark.parametrize("penalty", [{"presence_penalty": 2.0}, {"frequency_penalty": 1.5}])
    def test_penalties_count_what_another_engine_has_said_of_the_answer(self, open_engine, penalty):
        engine = open_engine()
        options = {"logit_bias": self.unspeakable(engine), "ignore_eos": True, **penalty}
        whole = open_engine().complete(PROMPTS[0], 24, **options)
        for count in (3, 6, 9, 20):
            text = b"".join(whole.pieces[:count]).decode()
            assert text + engine.complete(PROMPTS[0], 24, said=Said(text, count), **options).text == whole.text

    def test_a_bias_can_force_a_token_and_another_can_ban_it(self, engine):
        token = engine.tokens("A")[-1]
        forced = engine.complete(PROMPTS[0], 5, logit_bias={token: 100.0})
        assert forced.text == "AAAAA"
        banned = engine.complete(PROMPTS[0], 5, logit_bias={token: -100.0}, ignore_eos=True)
        assert "A" not in banned.text
        (first,) = engine.ids(engine.complete(PROMPTS[0], 1, ignore_eos=True))
        other = engine.complete(PROMPTS[0], 1, logit_bias={first: -100.0}, ignore_eos=True)
        assert engine.ids(other) != [first]

    def test_a_bias_outside_the_vocabulary_is_refused_and_takes_no_slot(self, open_engine):
        engine = open_engine(slots=1)
        for token in (-1, engine.info.vocab_size, 10**9):
            with pytest.raises(InvalidRequest) as refusal:
                engine.submit(PROMPTS[0], 4, logit_bias={token: 1.0})
            assert refusal.value.param == "logit_bias"
        assert engine.complete(PROMPTS[0], 4).finish is Finish.LENGTH

    def test_a_prompt_outside_the_vocabulary_is_refused_and_takes_no_slot(self, open_engine):
        engine = open_engine(slots=1)
        for token in (-1, engine.info.vocab_size, 10**9):
            with pytest.raises(InvalidRequest) as refusal:
                engine.submit([5, token, 6], 4)
            assert refusal.value.param == "prompt"
        assert engine.complete(PROMPTS[0], 4).finish is Finish.LENGTH

    def test_a_frequency_penalty_ends_a_repetition(self, engine):
        token = engine.tokens("A")[-1]
        generation = engine.complete(PROMPTS[0], 40, logit_bias={token: 60.0}, frequency_penalty=2.0, ignore_eos=True)
        assert generation.text.startswith("AAAAA")
        assert generation.text != "A" * 40

    # --- what the shared tests ask for ------------------------------------------------------------------------

    def submit_failing(self, engine: Engine, prompt: str, max_tokens: int) -> Generation:
        """By a bias that leaves no token to choose."""
        nothing = dict.fromkeys(range(engine.info.vocab_size), -math.inf)
        return engine.submit(prompt, max_tokens, logit_bias=nothing)

    @staticmethod
    def unspeakable(engine: Engine) -> dict[int, float]:
        pieces = ((token, engine.backend.detokenize([token])) for token in range(engine.info.vocab_size))
        return {token: -math.inf for token, piece in pieces if not piece.isascii()}
