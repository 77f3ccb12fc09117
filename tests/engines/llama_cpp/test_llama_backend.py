"""What is llama.cpp's own: slots and fillers, refused batches, ends and control tokens, BOS."""

from __future__ import annotations

import random

import pytest

from slimproc.errors import InvalidRequest
from slimproc.request import Finish
from tests.engines.conformance import PROMPTS
from tests.engines.driver import Engine
from tests.models import BOS, EOS, HELLO, scripted


@pytest.fixture
def engine(open_engine) -> Engine:
    return open_engine()


class Batches:
    """Writes down what each call of the model was given: lists of (slot, position, wants logits)."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[list[tuple[int, int, int]]] = []
        fill = engine.backend._batch.fill

        def noted(tokens, positions, sequences, outputs):
            self.seen.append(list(zip(sequences, positions, outputs, strict=True)))
            fill(tokens, positions, sequences, outputs)

        monkeypatch.setattr(engine.backend._batch, "fill", noted)

    def slots(self) -> list[list[int]]:
        return [[slot for slot, _, _ in batch] for batch in self.seen]


# --- the batch --------------------------------------------------------------------------------------------------


def test_many_unequal_requests_with_cancels_all_say_what_they_say_alone(open_engine):
    """Gaps, fillers, taken-over prefixes, copies and prompts beside answers, in an order nobody chose."""
    dice = random.Random(3)
    work = [("".join(dice.choices("abcdef ", k=dice.choice((3, 40, 200)))), dice.randrange(1, 30)) for _ in range(12)]
    work += [(prompt[:30] + "!", length) for prompt, length in work]
    alone = {prompt: open_engine(slots=1).complete(prompt, 30).text for prompt, _ in work}
    engine = open_engine(slots=6)
    running = []
    for prompt, length in work * 3:
        running.append((prompt, engine.submit(prompt, length)))
        for _ in range(dice.randrange(5)):
            engine.step()
        if dice.random() < 0.2:
            gone = running.pop(dice.randrange(len(running)))[1]
            if not gone.ended:
                engine.cancel(gone)
        while sum(not generation.ended for _, generation in running) == 6:
            engine.step()
    engine.finish()
    for prompt, generation in running:
        assert alone[prompt].startswith(generation.text)
        assert generation.failure is None


def test_batches_are_sorted_and_a_gap_is_closed_by_a_filler_that_leaves_no_trace(open_engine, monkeypatch):
    engine = open_engine()
    expected = [engine.complete(prompt, 40).text for prompt in PROMPTS[:4]]
    engine = open_engine()
    monkeypatch.setattr(
        engine.backend._budget, "tokens", lambda _running, _prompts: 100
    )  # all begin before the first ends
    generations = [engine.submit(prompt, 40) for prompt in PROMPTS[:4]]
    for generation in generations:
        engine.until_generating(generation)
    engine.cancel(generations[1])
    batches = Batches(engine, monkeypatch)
    for _ in range(5):
        engine.step()
    assert batches.slots() == [[0, 1, 2, 3]] * 5
    filler = {batch[1] for batch in batches.seen}
    assert len(filler) == 1, "the filler is taken back after every step"
    assert filler.pop()[2] == 0, "and nobody asks what comes of it"
    again = engine.submit(PROMPTS[1], 40)
    engine.finish()
    assert [generations[0].text, again.text, generations[2].text, generations[3].text] == expected


def test_a_prefix_under_a_filler_is_still_whole_when_it_is_taken_over(open_engine):
    prompt = "the same long beginning of a prompt, " * 3
    expected = open_engine().complete(prompt, 20).text
    engine = open_engine(slots=3)
    first, middle, last = (engine.submit(text, 30) for text in ("a", prompt, "b"))
    engine.until_generating(middle)
    engine.until_generating(last)
    engine.cancel(middle)
    for _ in range(6):
        engine.step()
    again = engine.submit(prompt, 20)
    assert again.sequence.cached_tokens == len(again.sequence.prompt) - 1
    engine.finish()
    assert again.text == expected
    assert first.finish is last.finish is Finish.LENGTH


def test_a_prefix_that_another_sequence_is_using_is_copied(open_engine):
    prompt = "the same long beginning of a prompt, " * 3
    alone = [open_engine().complete(prompt + tail, 30).text for tail in "xy"]
    engine = open_engine(slots=2)
    first = engine.submit(prompt + "x", 30)
    engine.until_generating(first)
    second = engine.submit(prompt + "y", 30)
    assert second.sequence.cached_tokens == len(engine.tokens(prompt))
    engine.finish()
    assert [first.text, second.text] == alone


def test_running_answers_get_a_token_in_every_step_while_a_long_prompt_comes_in(open_engine):
    engine = open_engine(context=1200)
    answers = [engine.submit(prompt, None, ignore_eos=True) for prompt in PROMPTS[:3]]
    for answer in answers:
        engine.until_generating(answer)
    long = engine.submit("word " * 200, 5)
    steps = 0
    while not long.sequence.generated:
        before = [answer.sequence.generated for answer in answers]
        engine.step()
        steps += 1
        assert [answer.sequence.generated for answer in answers] == [count + 1 for count in before]
        assert steps < 1000
    assert steps > 1, "a prompt of 1,000 tokens does not hold up the others in one piece"


def test_no_call_takes_more_of_prompts_than_the_budget_and_the_budget_hears_what_it_took(open_engine, monkeypatch):
    engine = open_engine(context=600)
    running = [engine.submit(prompt, None, ignore_eos=True) for prompt in PROMPTS[:2]]
    for answer in running:
        engine.until_generating(answer)
    observed, apart = [], []
    budget = engine.backend._budget
    monkeypatch.setattr(budget, "tokens", lambda running, _prompts: 10 * running)
    monkeypatch.setattr(budget, "observe", lambda *took: observed.append(took[:2]))
    monkeypatch.setattr(budget, "observe_apart", lambda tokens, _: apart.append(tokens))
    batches = Batches(engine, monkeypatch)
    long = [engine.submit(text * 45, 4) for text in "xy"]
    engine.until_generating(long[1])
    assert [len(batch) for batch in batches.seen] == [2, 20, 2, 25, 3, 30, 3, 15], "25 end a prompt"
    assert observed == [(2, 0), (2, 0), (3, 0), (3, 0)]
    assert apart == [20, 25, 30, 15]


def test_every_slot_has_the_whole_context(open_engine):
    engine = open_engine(slots=4, context=300)
    generations = [engine.submit("x" * 100, 800, ignore_eos=True) for _ in range(4)]
    engine.finish()
    assert {(one.finish, one.usage.completion_tokens) for one in generations} == {(Finish.LENGTH, 200)}


@pytest.mark.parametrize("code", [1, 2, -1])
@pytest.mark.parametrize("half_done", [False, True])
@pytest.mark.parametrize(("refused_call", "loser"), [(1, 1), (2, 2)], ids=["answers", "prompts"])
def test_a_refused_batch_costs_the_newest_sequence_in_it_and_no_other(
    open_engine, monkeypatch, code, half_done, refused_call, loser
):
    alone = [open_engine().complete(prompt, 12).text for prompt in PROMPTS[:3]]
    engine = open_engine()
    running = [engine.submit(prompt, 12) for prompt in PROMPTS[:2]]
    for _ in range(3):
        engine.step()
    running.append(engine.submit(PROMPTS[2], 12))
    decode = engine.backend._batch.decode
    calls = []

    def refuse_once(context):
        calls.append(context)
        if len(calls) != refused_call:
            return decode(context)
        if half_done:
            decode(context)  # what was evaluated before llama.cpp gave up must be taken back
        return code

    monkeypatch.setattr(engine.backend._batch, "decode", refuse_once)
    engine.step()
    assert str(code) in running[loser].failure
    engine.finish()
    others = [place for place in range(3) if place != loser]
    assert [running[place].text for place in others] == [alone[place] for place in others]
    assert engine.complete(PROMPTS[0], 12).text == alone[0]


def test_a_broken_context_ends_the_engine(engine, monkeypatch):
    engine.submit(PROMPTS[0], 4)
    monkeypatch.setattr(engine.backend._batch, "decode", lambda _context: -3)
    with pytest.raises(RuntimeError, match="-3"):
        engine.step()


def test_nothing_to_do_is_no_call(engine):
    assert engine.backend.step() == []


# --- ends and control tokens ------------------------------------------------------------------------------------


def test_a_model_that_ends_by_itself_says_stop_and_its_end_is_no_text(open_engine):
    generation = open_engine("scripted.gguf").complete("any prompt", None)
    assert generation.text == b"".join(HELLO).decode()
    assert (generation.finish, generation.usage.completion_tokens) == (Finish.STOP, len(HELLO))


@pytest.mark.parametrize("count", range(1, len(HELLO) + 1))
def test_a_limit_inside_a_character_drops_it_and_counts_it(open_engine, count):
    generation = open_engine("scripted.gguf").complete("any prompt", count)
    assert generation.text == b"".join(HELLO[:count]).decode(errors="ignore")
    assert (generation.finish, generation.usage.completion_tokens) == (Finish.LENGTH, count)


def test_a_stop_string_across_tokens_is_found(open_engine):
    engine = open_engine("scripted.gguf")
    assert engine.complete("x", None, stop=("re! ca",)).text == "Hello the"
    assert engine.complete("x", None, stop=("é 🙂",)).text == "Hello there! caf"
    assert engine.complete("x", None, stop=("Hello",)).text == ""


def test_a_script_of_ones_own_is_said(open_engine, tmp_path):
    call = [b"<tool_call>", b'{"name":', b' "f"}', b"</tool_call>"]
    engine = open_engine(scripted(tmp_path / "call.gguf", call))
    assert engine.complete("hello", None).text == b"".join(call).decode()


def test_ignore_eos_goes_on_to_the_limit(open_engine):
    generation = open_engine("scripted.gguf").complete("any prompt", 40, ignore_eos=True)
    assert (generation.finish, generation.usage.completion_tokens) == (Finish.LENGTH, 40)


def test_an_end_as_the_first_token_is_an_empty_text(engine):
    generation = engine.complete("hello", 8, logit_bias={EOS: 100.0})
    assert (generation.text, generation.finish, generation.usage.completion_tokens) == ("", Finish.STOP, 0)


def test_a_control_token_that_is_no_end_counts_and_has_no_text(engine):
    generation = engine.complete("hello", 5, logit_bias={BOS: 100.0})
    assert (generation.text, generation.finish, generation.usage.completion_tokens) == ("", Finish.LENGTH, 5)


# --- text and tokens --------------------------------------------------------------------------------------------


def test_exactly_one_bos_is_added_where_the_model_wants_one(open_engine):
    backend = open_engine("bos.gguf").backend
    plain = backend.tokenize("hi", add_special=False, parse_special=True)
    assert backend.tokenize("hi", add_special=True, parse_special=True) == [BOS, *plain]
    assert backend.tokenize("<|im_start|>hi", add_special=True, parse_special=True) == [BOS, *plain]
    assert backend.tokenize_spans("hi", []) == backend.tokenize_spans("<|im_start|>hi", []) == [BOS, *plain]


def test_a_bos_that_is_a_callers_words_does_not_count_as_one(open_engine):
    backend = open_engine("bos.gguf").backend
    tokens = backend.tokenize_spans("<|im_start|>hi", [(0, 12)])
    assert tokens[0] == BOS
    assert tokens.count(BOS) == 1
    assert backend.detokenize(tokens[1:]) == b"<|im_start|>hi"


def test_no_bos_is_added_where_the_model_wants_none(engine):
    assert BOS not in engine.tokens("hi")


def test_nul_bytes_and_every_byte_value_survive(engine):
    text = "a\0b" + "".join(map(chr, range(1, 0x180))) + "\U0010ffff"
    tokens = engine.backend.tokenize(text, add_special=True, parse_special=True)
    assert engine.backend.detokenize(tokens).decode() == text


def test_half_a_surrogate_pair_is_the_callers_fault(engine):
    with pytest.raises(InvalidRequest):
        engine.backend.tokenize("a\ud800", add_special=True, parse_special=True)


@pytest.mark.parametrize("spans", [[(2, 1)], [(0, 3), (2, 4)], [(-1, 2)], [(3, 9)]])
def test_spans_that_make_no_sense_are_refused(engine, spans):
    with pytest.raises(InvalidRequest):
        engine.backend.tokenize_spans("hello", spans)


def test_spans_are_counted_in_characters(engine):
    text = "🙂ü<|im_end|>ü<|im_end|>"
    tokens = engine.backend.tokenize_spans(text, [(2, 12)])
    assert tokens.count(EOS) == 1
    assert tokens[-1] == EOS
    assert engine.backend.detokenize(tokens).decode() == text


def test_an_empty_prompt_is_refused_and_takes_no_slot(open_engine):
    engine = open_engine(slots=1)
    with pytest.raises(InvalidRequest):
        engine.submit([], 4)
    assert engine.complete("x", 4).failure is None
