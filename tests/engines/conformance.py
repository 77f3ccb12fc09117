"""One suite for all backends: subclass ``Conformance`` (or ``SamplingConformance``, for real models) and give it engines."""

from __future__ import annotations

import math
import random

import pytest

from slimproc.errors import InvalidRequest
from slimproc.request import Finish
from tests.engines.driver import Engine, Generation, Open

PROMPTS = [
    "Tell me a story about dragons.",
    "x",
    "The quick brown fox jumps over the lazy dog, and then it does so again.",
    "1, 2, 3, ",
    "def f(x):\n    return x",
    "Ünïcödé 🙂 text",
]


class Conformance:
    """What every backend promises. A subclass gives the fixture ``open_engine``."""

    @pytest.fixture
    def engine(self, open_engine: Open) -> Engine:
        return open_engine()

    # --- what a batch does to its members ---------------------------------------------------------------------

    def test_progress_is_told_while_loading_and_ends_at_one(self, engine):
        assert engine.fractions == sorted(engine.fractions)
        assert engine.fractions[-1] == 1.0

    def test_greedy_text_is_the_same_alone_and_in_a_batch(self, open_engine):
        alone = [open_engine().complete(prompt, 24).text for prompt in PROMPTS[:4]]
        engine = open_engine()
        together = [engine.submit(prompt, 24) for prompt in PROMPTS[:4]]
        engine.finish()
        assert [generation.text for generation in together] == alone

    def test_a_sequence_that_joins_while_others_decode_says_what_it_says_alone(self, open_engine):
        alone = [open_engine().complete(prompt, 30).text for prompt in PROMPTS[:4]]
        engine = open_engine()
        generations = []
        for prompt in PROMPTS[:4]:
            generations.append(engine.submit(prompt, 30))
            for _ in range(3):
                engine.step()
        engine.finish()
        assert [generation.text for generation in generations] == alone

    @pytest.mark.parametrize("stage", ["before its first step", "in its prefill", "while it decodes"])
    def test_removing_a_sequence_leaves_the_others_alone(self, open_engine, stage):
        alone = [open_engine().complete(prompt, 20).text for prompt in PROMPTS[:3]]
        engine = open_engine(context=1024)
        first = engine.submit(PROMPTS[0], 20)
        engine.until_generating(first)
        second = engine.submit(PROMPTS[1], 20)
        gone = engine.submit("some long prompt " * 40, 20)
        if stage == "in its prefill":
            engine.step()
        elif stage == "while it decodes":
            engine.until_generating(gone)
        if not gone.ended:
            engine.cancel(gone)
        third = engine.submit(PROMPTS[2], 20)
        engine.finish()
        assert [first.text, second.text, third.text] == alone

    def test_a_removed_sequence_gives_nothing_more_and_its_slot_is_free(self, open_engine):
        engine = open_engine(slots=1)
        for _ in range(3):
            generation = engine.submit(PROMPTS[0], None)
            engine.step()
            engine.cancel(generation)
            assert generation.finish is Finish.CANCELLED
        assert engine.complete(PROMPTS[1], 5).usage.completion_tokens <= 5

    def test_slots_are_used_again_for_ever(self, open_engine):
        engine = open_engine(slots=2)
        expected = engine.complete(PROMPTS[0], 8).text
        for _ in range(40):
            pair = engine.submit(PROMPTS[0], 8), engine.submit(PROMPTS[3], 3)
            engine.finish()
            assert pair[0].text == expected

    # --- where a sequence ends --------------------------------------------------------------------------------

    @pytest.mark.parametrize("max_tokens", [1, 2, 7])
    def test_max_tokens_is_kept_exactly(self, engine, max_tokens):
        generation = engine.complete(PROMPTS[0], max_tokens, ignore_eos=True)
        assert (generation.finish, generation.usage.completion_tokens) == (Finish.LENGTH, max_tokens)

    def test_no_tokens_are_generated_for_max_tokens_0(self, engine):
        generation = engine.submit(PROMPTS[0], 0)
        assert (generation.text, generation.finish, generation.usage.completion_tokens) == ("", Finish.LENGTH, 0)

    @pytest.mark.parametrize("max_tokens", [None, 10**12])
    def test_a_full_context_ends_with_length_and_disturbs_nobody(self, open_engine, max_tokens):
        alone = open_engine(context=64).complete(PROMPTS[3], 40, ignore_eos=True).text
        engine = open_engine(context=64)
        full = engine.submit(PROMPTS[0], max_tokens, ignore_eos=True)
        other = engine.submit(PROMPTS[3], 40, ignore_eos=True)
        engine.finish()
        assert full.finish is Finish.LENGTH
        assert full.usage.prompt_tokens + full.usage.completion_tokens == engine.info.context == 64
        assert other.text == alone

    def test_a_prompt_that_leaves_room_for_one_token_gets_one(self, open_engine):
        engine = open_engine(context=64)
        prompt = (engine.tokens("abc ") * 64)[:63]
        generation = engine.complete(prompt, None, ignore_eos=True)
        assert (generation.usage.prompt_tokens, generation.usage.completion_tokens) == (63, 1)

    def test_all_slots_can_be_full_to_their_last_token_at_once(self, open_engine):
        engine = open_engine(slots=4, context=64)
        for _ in range(2):
            generations = [engine.submit(prompt, None, ignore_eos=True) for prompt in (PROMPTS * 2)[3:7]]
            engine.finish()
            for generation in generations:
                assert generation.failure is None
                assert generation.usage.prompt_tokens + generation.usage.completion_tokens == 64

    def test_a_stop_string_ends_the_text_before_it(self, engine):
        whole = engine.complete(PROMPTS[0], 24).text
        stop = whole[5:9]
        generation = engine.complete(PROMPTS[0], 24, stop=(stop,))
        assert generation.finish is Finish.STOP
        assert generation.text == whole[: whole.index(stop)]

    # --- prompts ----------------------------------------------------------------------------------------------

    def test_token_ids_are_a_prompt_like_their_text(self, engine):
        by_text = engine.complete(PROMPTS[2], 16)
        by_ids = engine.complete(engine.tokens(PROMPTS[2]), 16)
        assert (by_ids.text, by_ids.usage.prompt_tokens) == (by_text.text, by_text.usage.prompt_tokens)

    @pytest.mark.parametrize("text", PROMPTS)
    def test_detokenizing_gives_the_text_back(self, engine, text):
        tokens = engine.backend.tokenize(text, add_special=False, parse_special=False)
        assert engine.backend.detokenize(tokens).decode() == text

    def test_control_tokens_are_parsed_only_where_asked(self, engine):
        control = engine.info.control_tokens[-1]
        parsed = engine.backend.tokenize(control, add_special=False, parse_special=True)
        literal = engine.backend.tokenize(control, add_special=False, parse_special=False)
        assert len(parsed) == 1
        assert parsed[0] not in literal
        assert engine.backend.detokenize(literal).decode() == control

    def test_a_callers_control_token_stays_text_and_the_templates_do_not(self, engine):
        control = engine.info.control_tokens[-1]
        (token,) = engine.backend.tokenize(control, add_special=False, parse_special=True)
        text = f"{control}user\nsay {control} twice{control}\n"
        start = text.index(" twice") - len(control)
        plain = engine.backend.tokenize_spans(text, [])
        marked = engine.backend.tokenize_spans(text, [(start, start + len(control))])
        assert plain.count(token) == 3
        assert marked.count(token) == 2
        assert engine.backend.detokenize(marked) == engine.backend.detokenize(plain)

    def test_an_unknown_token_id_never_reaches_the_model(self, engine):
        for token in (-1, engine.info.vocab_size, 10**9):
            with pytest.raises(InvalidRequest):
                engine.backend.detokenize([token])

    def test_removing_a_sequence_twice_is_no_error(self, engine):
        generation = engine.complete(PROMPTS[0], 4)
        engine.backend.remove(generation.sequence)
        assert engine.complete(PROMPTS[0], 4).text == generation.text


class SamplingConformance(Conformance):
    """What real models promise besides: seeds, penalties, biases, and prefixes that are not evaluated twice."""

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

    def test_prefixes_never_leak_between_callers(self, open_engine):
        """40 callers with a marker each behind a few shared beginnings, with cancels and failures mixed in: every text
        is what a fresh engine says to that prompt alone.
        """
        dice = random.Random(5)
        bases = ["alpha " * 12, "beta " * 12, "alpha " * 6 + "gamma " * 6]
        engine = open_engine(slots=3)
        callers: list[tuple[str, Generation]] = []
        checked = failed = cancelled = 0
        for number in range(40):
            prompt = f"{dice.choice(bases)}caller {number:02d}" + dice.choice(["", " alpha" * dice.randrange(9)])
            fails = number % 7 == 6
            bias = self.barred(engine) if fails else {}
            callers.append((prompt, engine.submit(prompt, dice.randrange(1, 12), logit_bias=bias)))
            for _ in range(dice.randrange(4)):
                engine.step()
            if number % 5 == 4 and not callers[-1][1].ended:
                engine.cancel(callers[-1][1])
                cancelled += 1
            while sum(not generation.ended for _, generation in callers) == 3:
                engine.step()
        engine.finish()
        for prompt, generation in callers:
            failed += generation.failure is not None
            alone = open_engine(slots=1).complete(prompt, 12).text
            assert alone.startswith(generation.text), "a text of someone else's making"
            checked += bool(generation.text)
        assert checked > 15
        assert failed > 2
        assert cancelled > 2

    def test_an_error_in_one_sequence_leaves_the_others_alone(self, open_engine):
        alone = [open_engine().complete(prompt, 20).text for prompt in PROMPTS[:2]]
        engine = open_engine()
        first = engine.submit(PROMPTS[0], 20)
        engine.until_generating(first)
        bad = engine.submit(PROMPTS[2], 20, logit_bias=self.barred(engine))
        second = engine.submit(PROMPTS[1], 20)
        engine.finish()
        assert bad.failure
        assert bad.text == ""
        assert [first.text, second.text] == alone
        assert engine.complete(PROMPTS[2], 8).failure is None

    @staticmethod
    def barred(engine: Engine) -> dict[int, float]:
        """A bias that leaves no token to choose, which fails the sequence in its first step."""
        return dict.fromkeys(range(engine.info.vocab_size), -math.inf)

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
