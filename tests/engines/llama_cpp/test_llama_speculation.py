"""Guessing ahead: whatever is guessed, every answer is what it is without, in fewer steps where the guesses are right."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimproc.engines.llama_cpp.lookup import GRAM, PromptLookup
from slimproc.request import Finish
from tests.engines.conformance import PROMPTS
from tests.engines.driver import Engine, Generation
from tests.models import BOS, HELLO

CHOSEN = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5},
    "limited": {"temperature": 1.0, "seed": 6, "top_p": 0.8, "top_k": 40, "min_p": 0.01},
    "penalized": {"temperature": 0.7, "seed": 8, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
    "biased": {"logit_bias": {70: 3.0, 80: -100.0}},
    "end ignored": {"ignore_eos": True},
}


class Oracle:
    """Guesses what the answers to known prompts are, right with the probability ``right`` for each token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, right: float = 1.0) -> None:
        self._texts: list[list[int]] = []
        self._dice = random.Random(1)
        self.right = right
        self.guesses = 0
        monkeypatch.setattr(PromptLookup, "guess", lambda _lookup, tokens, most: self._guess(tokens, most))

    def learn(self, engine: Engine, generation: Generation) -> None:
        by_piece = {engine.backend.detokenize([token]): token for token in range(engine.info.vocab_size)}
        by_piece[b""] = BOS  # the one control token that is no end
        self._texts.append([*generation.sequence.prompt, *(by_piece[piece] for piece in generation.pieces)])

    def _guess(self, tokens: list[int], count: int) -> list[int]:
        self.guesses += 1
        text = next((text for text in self._texts if text[: len(tokens)] == tokens), tokens)
        guess = text[len(tokens) :][:count]
        guess += [3] * (count - len(guess))
        return [token if self._dice.random() < self.right else self._dice.randrange(3, 259) for token in guess]


@pytest.fixture
def oracle(monkeypatch) -> Oracle:
    return Oracle(monkeypatch)


def steps_of(engine: Engine, *generations: Generation) -> int:
    steps = 0
    while not all(generation.ended for generation in generations):
        engine.step()
        steps += 1
    return steps


@pytest.mark.parametrize("right", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("options", CHOSEN.values(), ids=CHOSEN)
def test_an_answer_is_the_same_however_good_the_guesses_are(open_engine, oracle, options, right):
    plain = open_engine()
    expected = [plain.complete(prompt, 40, **options) for prompt in PROMPTS]
    for generation in expected:
        oracle.learn(plain, generation)
    oracle.right = right
    engine = open_engine(speculation=4)
    for prompt, wanted in zip(PROMPTS, expected, strict=True):
        generation = engine.complete(prompt, 40, **options)
        assert (generation.pieces, generation.finish) == (wanted.pieces, wanted.finish)
        assert generation.usage.completion_tokens == wanted.usage.completion_tokens
    assert oracle.guesses


@pytest.mark.parametrize("options", CHOSEN.values(), ids=CHOSEN)
def test_answers_in_a_batch_are_the_same_too_and_so_is_what_takes_over_their_slots(open_engine, oracle, options):
    plain = open_engine()
    expected = {prompt: plain.complete(prompt, 30, **options) for prompt in PROMPTS}
    for generation in expected.values():
        oracle.learn(plain, generation)
    oracle.right = 0.6
    engine = open_engine(speculation=3)
    dice = random.Random(2)
    for _ in range(4):
        chosen = dice.sample(PROMPTS, 4)
        generations = []
        for prompt in chosen:
            generations.append(engine.submit(prompt, 30, **options))
            for _ in range(dice.randrange(6)):
                engine.step()
        if not generations[1].ended:
            engine.cancel(generations[1])
        engine.finish()
        for prompt, generation in zip(chosen, generations, strict=True):
            if generation.finish is not Finish.CANCELLED:
                assert generation.pieces == expected[prompt].pieces
            assert expected[prompt].text.startswith(generation.text.rstrip("\ufffd"))


def test_right_guesses_save_steps_and_wrong_ones_cost_none(open_engine, oracle):
    plain = open_engine()
    expected = plain.complete(PROMPTS[0], 41, ignore_eos=True)
    oracle.learn(plain, expected)
    engine = open_engine(speculation=4)
    generation = engine.submit(PROMPTS[0], 41, ignore_eos=True)
    engine.until_generating(generation)
    assert steps_of(engine, generation) == 8, "40 tokens, five a step"
    assert generation.pieces == expected.pieces
    oracle.right = 0.0
    generation = engine.submit(PROMPTS[0], 41, ignore_eos=True)
    engine.until_generating(generation)
    assert steps_of(engine, generation) == 40


def test_copying_text_is_guessed_from_the_prompt_alone(open_engine):
    """A script that goes round for ever: after the first round every step gives as many tokens as it may."""
    engine = open_engine("scripted.gguf", speculation=4)
    said = "".join(piece.decode("latin-1") for piece in HELLO)
    generation = engine.submit(f"{said} and again: ", None, ignore_eos=True, logit_bias={2: -100.0})
    engine.until_generating(generation)
    steps = steps_of(engine, generation)
    assert generation.usage.completion_tokens > 2 * steps
    plain = open_engine("scripted.gguf").complete(f"{said} and again: ", None, ignore_eos=True, logit_bias={2: -100.0})
    assert generation.pieces == plain.pieces


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_max_tokens_is_kept_exactly_and_the_last_token_is_never_evaluated(open_engine, oracle, max_tokens):
    plain = open_engine()
    expected = plain.complete(PROMPTS[0], 20, ignore_eos=True)
    oracle.learn(plain, expected)
    engine = open_engine(speculation=4)
    generation = engine.complete(PROMPTS[0], max_tokens, ignore_eos=True)
    assert generation.pieces == expected.pieces[:max_tokens]
    assert (generation.finish, generation.usage.completion_tokens) == (Finish.LENGTH, max_tokens)
    again = engine.complete([*generation.sequence.prompt, *engine.ids(generation), 5, 6], 1)
    assert again.usage.cached_tokens == len(generation.sequence.prompt) + max_tokens - 1


def test_a_full_context_ends_with_length_in_every_slot(open_engine, oracle):
    plain = open_engine(context=96)
    for prompt in PROMPTS[:4]:
        oracle.learn(plain, plain.complete(prompt, None, ignore_eos=True))
    engine = open_engine(context=96, speculation=16)
    generations = [engine.submit(prompt, None, ignore_eos=True) for prompt in PROMPTS[:4]]
    engine.finish()
    for generation in generations:
        assert generation.finish is Finish.LENGTH
        assert generation.usage.prompt_tokens + generation.usage.completion_tokens == 96


@pytest.mark.parametrize("stop", ["re! ca", "é 🙂", "!", "Hello"])
def test_a_stop_string_in_the_middle_of_right_guesses_ends_the_text_before_it(open_engine, oracle, stop):
    plain = open_engine("scripted.gguf")
    whole = plain.complete("x", None)
    oracle.learn(plain, whole)
    engine = open_engine("scripted.gguf", speculation=4)
    generation = engine.complete("x", None, stop=(stop,))
    assert generation.finish is Finish.STOP
    assert generation.text == whole.text[: whole.text.index(stop)]
    assert generation.usage.completion_tokens == plain.complete("x", None, stop=(stop,)).usage.completion_tokens
    assert engine.complete("x", None).text == whole.text


def test_an_end_that_was_guessed_ends_it(open_engine, oracle):
    plain = open_engine("scripted.gguf")
    whole = plain.complete("x", None)
    oracle.learn(plain, whole)
    for text in oracle._texts:
        text += [2, 3, 4]
    generation = open_engine("scripted.gguf", speculation=8).complete("x", None)
    assert (generation.text, generation.finish) == (whole.text, Finish.STOP)
    assert generation.usage.completion_tokens == len(HELLO)


def test_log_probabilities_are_those_of_each_token(open_engine, oracle):
    plain = open_engine()
    expected = plain.complete(PROMPTS[0], 20, logprobs=3, temperature=1.0, seed=3)
    oracle.learn(plain, expected)
    oracle.right = 0.7
    engine = open_engine(speculation=4)
    generation = engine.complete(PROMPTS[0], 20, logprobs=3, temperature=1.0, seed=3)
    assert [one.piece for one in generation.logprobs] == [one.piece for one in expected.logprobs]
    for one, other in zip(generation.logprobs, expected.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-4)
    echoed = engine.complete(PROMPTS[0], 20, logprobs=0, echo=True)
    assert len(echoed.logprobs) == echoed.usage.prompt_tokens + 20


@pytest.mark.parametrize("code", [1, -1])
@pytest.mark.parametrize("half_done", [False, True])
def test_a_refused_batch_leaves_no_guess_behind(open_engine, oracle, monkeypatch, code, half_done):
    plain = open_engine()
    expected = plain.complete(PROMPTS[0], 30)
    oracle.learn(plain, expected)
    engine = open_engine(speculation=4)
    older, newest = (engine.submit(PROMPTS[0], 30) for _ in range(2))
    for generation in (older, newest):
        engine.until_generating(generation)
    decode = engine.backend._batch.decode

    def refuse_once(context):
        if half_done:
            decode(context)
        monkeypatch.setattr(engine.backend._batch, "decode", decode)
        return code

    monkeypatch.setattr(engine.backend._batch, "decode", refuse_once)
    engine.finish()
    assert str(code) in newest.failure
    assert older.pieces == expected.pieces


def test_a_prompt_that_comes_in_does_not_wait_for_guesses(open_engine, oracle, monkeypatch):
    engine = open_engine(speculation=4, context=600)
    monkeypatch.setattr(engine.backend._budget, "tokens", lambda _running, _prompts: 16)
    running = engine.submit(PROMPTS[0], None, ignore_eos=True)
    engine.until_generating(running)
    long = engine.submit("x" * 200, 4)
    while not long.sequence.generated:
        before, guessed = running.sequence.generated, oracle.guesses
        engine.step()
        if not long.sequence.generated:
            assert running.sequence.generated == before + 1
            assert oracle.guesses == guessed


def test_every_guess_of_a_call_is_as_long_and_there_is_none_beside_a_filler(open_engine, oracle, monkeypatch):
    """Unequal numbers of tokens would cost passes over the weights."""
    engine = open_engine(speculation=4)
    monkeypatch.setattr(engine.backend._budget, "tokens", lambda _running, _prompts: 100)
    sizes = []
    fill = engine.backend._batch.fill

    def noted(tokens, positions, sequences, outputs):
        sizes.append({slot: sequences.count(slot) for slot in sequences})
        fill(tokens, positions, sequences, outputs)

    monkeypatch.setattr(engine.backend._batch, "fill", noted)
    generations = [engine.submit(prompt, 50 + 10 * place, ignore_eos=True) for place, prompt in enumerate(PROMPTS[:3])]
    for generation in generations:
        engine.until_generating(generation)
    del sizes[:]
    engine.step()
    assert sizes == [{0: 5, 1: 5, 2: 5}]
    engine.cancel(generations[1])
    engine.step()
    assert sizes[1:] == [{0: 1, 1: 1, 2: 1}], "slot 1 has a filler"
    engine.finish()
    assert all(len(set(batch.values())) == 1 for batch in sizes)


def test_the_details_say_it(open_engine):
    assert open_engine(speculation=5).info.details["speculation"] == 5


# --- the guess itself -----------------------------------------------------------------------------------------------


def test_what_came_after_the_same_tokens_the_last_time_is_guessed():
    assert PromptLookup().guess([1, 2, 3, 4, 9, 1, 2, 3, 5, 6, 7, 8, 1, 2, 3], 2) == [5, 6]
    assert PromptLookup().guess([1, 2, 3, 4], 4) == []
    assert PromptLookup().guess([1, 2], 4) == []


def test_a_repetition_shorter_than_the_guess_goes_round():
    lookup = PromptLookup()
    lookup.judge(8, 8, 0)
    assert lookup.guess([1, 2, 3, 1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]
    assert lookup.guess([1, 2, 3, 1, 2, 3, 1, 2, 3, 3, 3, 3, 3], 5) == [3] * 5


def test_guesses_grow_while_they_come_true_and_rest_longer_and_longer_while_none_does():
    lookup, text = PromptLookup(), [7] * 9
    sizes = []
    for _ in range(4):
        guess = lookup.guess(text, 16)
        sizes.append(len(guess))
        text += guess
        lookup.judge(len(guess), len(guess), len(text))
    assert sizes == [2, 4, 8, 16]
    lookup.judge(3, 16, len(text))
    assert len(lookup.guess(text, 16)) == 3
    pauses = []
    for _ in range(8):
        lookup.judge(0, 2, len(text))
        pauses.append(0)
        while not lookup.guess(text, 16):
            text.append(7)
            pauses[-1] += 1
    assert pauses == [2, 4, 8, 16, 32, 64, 64, 64]
    lookup.judge(1, 2, len(text))
    lookup.judge(0, 2, len(text))
    assert len(lookup.guess([*text, 7, 7], 16)) == 2, "one that came true makes good for all that did not"


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 6))
def test_asking_all_along_gives_what_asking_once_gives(tokens, most):
    growing = PromptLookup()
    for length in range(len(tokens) + 1):
        guess = growing.guess(tokens[:length], most)
        assert guess == PromptLookup().guess(tokens[:length], most)
        assert len(guess) <= most
        if guess:
            places = [at for at in range(GRAM, length) if tokens[at - GRAM : at] == tokens[length - GRAM : length]]
            assert guess[0] == tokens[max(places)]
