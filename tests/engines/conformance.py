"""One suite for all backends: subclass ``Conformance`` and give it engines. ``sampling_conformance.py`` has more for real models."""

from __future__ import annotations

import random

import psutil
import pytest

from slimproc.errors import InvalidRequest
from slimproc.ipc.wire import Said
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

    # --- an answer that another engine has begun --------------------------------------------------------------

    def test_an_answer_that_goes_on_in_another_engine_says_the_rest_and_is_counted_as_one(self, open_engine):
        """Only where the text becomes the tokens again that it was made of is the rest promised."""
        engine = open_engine()
        plain = {"logit_bias": self.unspeakable(engine)}
        whole = open_engine().complete(PROMPTS[0], 24, **plain)
        for count in (1, 2, 3, 7, 12, 18, 23):
            text = b"".join(whole.pieces[:count]).decode()
            rest = engine.complete(PROMPTS[0], 24, said=Said(text, count), **plain)
            assert text + rest.text == whole.text
            assert rest.pieces == whole.pieces[count:]
            assert (rest.finish, rest.usage.completion_tokens) == (Finish.LENGTH, 24)
            assert rest.usage.prompt_tokens == whole.usage.prompt_tokens
            assert rest.usage.cached_tokens <= rest.usage.prompt_tokens

    def test_an_answer_that_goes_on_ends_where_the_whole_one_would_have(self, open_engine):
        engine = open_engine()
        plain = {"logit_bias": self.unspeakable(engine)}
        whole = engine.complete(PROMPTS[0], 24, **plain)
        stop = whole.text[7:11]
        said = Said(whole.pieces[0].decode(), 1)
        cut = engine.complete(PROMPTS[0], 24, stop=(stop,), **plain)
        rest = engine.complete(PROMPTS[0], 24, stop=(stop,), said=said, **plain)
        assert (said.text + rest.text, rest.finish) == (cut.text, Finish.STOP)
        assert rest.usage.completion_tokens == cut.usage.completion_tokens

    def test_any_text_is_gone_on_from_also_one_whose_characters_were_cut(self, engine):
        """Its tokens need not be those that it was made of, and whoever shares the batch notices nothing."""
        alone = engine.complete(PROMPTS[3], 12).text
        other = engine.submit(PROMPTS[3], 12)
        for text in ("\ufffd\ufffd", engine.info.control_tokens[-1], " ", "\n\n", "🙂é" * 9):
            rest = engine.complete(PROMPTS[0], 9, said=Said(text, 4), ignore_eos=True)
            assert (rest.failure, rest.finish, len(rest.pieces)) == (None, Finish.LENGTH, 5)
            assert rest.usage.prompt_tokens == len(engine.tokens(PROMPTS[0]))
        engine.finish()
        assert other.text == alone

    def test_an_answer_that_goes_on_where_the_context_is_full_ends_there(self, open_engine):
        engine = open_engine(context=64)
        said = "and so on " * 40
        rest = engine.complete(PROMPTS[1], None, said=Said(said, 50))
        assert (rest.text, rest.finish, rest.usage.completion_tokens) == ("", Finish.LENGTH, 50)

    def test_an_answer_that_has_said_all_it_may_ends_there(self, engine):
        for spoken in (7, 9):
            rest = engine.complete(PROMPTS[1], 7, said=Said("all of it", spoken))
            assert (rest.text, rest.finish, rest.usage.completion_tokens) == ("", Finish.LENGTH, spoken)

    @staticmethod
    def unspeakable(engine: Engine) -> dict[int, float]:
        """A bias against tokens that are no whole characters; for backends that choose their tokens by weights."""
        return {}

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

    # --- what one caller has of another -----------------------------------------------------------------------

    def test_prefixes_never_leak_between_callers(self, open_engine):
        """40 callers with a marker each behind a few shared beginnings, with cancels and failures mixed in: every text
        is what a fresh engine says to that prompt alone.
        """
        dice = random.Random(5)
        bases = ["alpha-" * 12, "beta-" * 14, "alpha-" * 6 + "gamma-" * 6]
        engine = open_engine(slots=3)
        callers: list[tuple[str, Generation]] = []
        checked = failed = cancelled = 0
        for number in range(40):
            prompt = f"{dice.choice(bases)}caller {number:02d}" + dice.choice(["", " alpha" * dice.randrange(9)])
            submit = self.submit_failing if number % 7 == 6 else self.submit_telling
            callers.append((prompt, submit(engine, prompt, dice.randrange(1, 12))))
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
            if generation.text:
                fresh = open_engine(slots=1)
                alone = self.submit_telling(fresh, prompt, 12)
                fresh.finish()
                assert alone.text.startswith(generation.text), "a text of someone else's making"
                checked += 1
        assert checked > 15
        assert failed > 2
        assert cancelled > 2

    def test_an_error_in_one_sequence_leaves_the_others_alone(self, open_engine):
        alone = [open_engine().complete(prompt, 20).text for prompt in PROMPTS[:2]]
        engine = open_engine()
        first = engine.submit(PROMPTS[0], 20)
        engine.until_generating(first)
        bad = self.submit_failing(engine, PROMPTS[2], 20)
        second = engine.submit(PROMPTS[1], 20)
        engine.finish()
        assert bad.failure
        assert bad.text == ""
        assert [first.text, second.text] == alone
        assert engine.complete(PROMPTS[2], 8).failure is None

    def submit_telling(self, engine: Engine, prompt: str, max_tokens: int) -> Generation:
        """A request whose text depends on all of its prompt."""
        return engine.submit(prompt, max_tokens)

    def submit_failing(self, engine: Engine, prompt: str, max_tokens: int) -> Generation:
        """A request that joins the batch and fails in its first step."""
        raise NotImplementedError

    # --- for long ---------------------------------------------------------------------------------------------

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    def test_a_thousand_requests_leave_no_memory_behind(self, open_engine):
        engine = open_engine()
        process = psutil.Process()

        def requests(count: int) -> int:
            for number in range(count):
                engine.submit(f"{number} " * 20, 8, temperature=1.0, top_p=0.9, frequency_penalty=0.1)
                if number % 4 == 3:
                    engine.finish()
            engine.finish()
            return process.memory_info().rss

        before = requests(200)
        assert requests(1000) - before < 4 << 20
