"""The fake backend gives the tokens that its script asks for, and refuses a script that it does not understand."""

import json
import math

import pytest
from driving import add, pieces, script
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slimproc.engines.backend import Produced, PromptScored, Scored, SequenceFailed
from slimproc.engines.scores import Score
from slimproc.errors import InvalidRequest
from slimproc.request import SamplingParams


def test_without_a_script_the_answer_is_numbered_tokens_without_end(make, clock):
    given_out = pieces(make(), clock, "hello", steps=40_000)

    assert given_out[:3] == [b" tok0", b" tok1", b" tok2"]
    assert given_out == [b" tok%d" % index for index in range(40_000)]


def test_every_step_gives_each_sequence_one_token(make):
    backend = make()
    sequences = [add(backend) for _ in range(3)]

    for index in range(5):
        assert backend.step() == [Produced(sequence, b" tok%d" % index) for sequence in sequences]


def test_scripted_tokens_come_once_and_the_last_one_ends_the_sequence(make):
    backend = make()
    sequence = add(backend, script(tokens=["a", " bc", {"hex": "f09f"}, {"hex": "9880"}]))

    events = [backend.step() for _ in range(4)]

    assert events == [
        [Produced(sequence, b"a")],
        [Produced(sequence, b" bc")],
        [Produced(sequence, b"\xf0\x9f")],
        [Produced(sequence, b"\x98\x80", end=True)],
    ]


def test_scripted_tokens_are_repeated(make, clock):
    assert pieces(make(), clock, script(tokens=["a", "b"], repeat=3)) == [b"a", b"b"] * 3


def test_an_empty_list_of_tokens_is_a_model_that_ends_at_once(make):
    backend = make()
    sequence = add(backend, script(tokens=[]))

    assert backend.step() == [Produced(sequence, b"", end=True)]


def test_with_ignore_eos_a_script_starts_again_instead_of_ending(make, clock):
    given_out = pieces(make(), clock, script(tokens=["a", "b"]), sampling=SamplingParams(ignore_eos=True), steps=7)

    assert given_out == [b"a", b"b", b"a", b"b", b"a", b"b", b"a"]


@pytest.mark.parametrize(
    "text", ["plain words", "é😀\n\n  spaced\tout  ", "<|im_start|>user\nhi<|im_end|>\n", "x" * 999]
)
def test_echo_gives_back_the_prompt_exactly_as_it_came(make, clock, text):
    prompt = f"{text}\n{script(echo=True)}\n after"

    given_out = pieces(make(), clock, prompt)

    assert b"".join(given_out).decode() == prompt
    assert len(given_out) > 1


def test_a_prompt_of_token_ids_can_carry_a_script(make, clock):
    backend = make()
    prompt = script(tokens=["a"])
    ids = backend.tokenize(prompt, add_special=True, parse_special=True)

    assert pieces(backend, clock, ids) == [b"a"]


def test_the_last_script_of_a_chat_counts_behind_the_templates_own_words(make, clock):
    backend = make()
    info = backend.load(lambda _: None)
    messages = [
        {"role": "user", "content": script(tokens=["old"])},
        {"role": "assistant", "content": "old"},
        {"role": "user", "content": script(tokens=["<|im_end|>", "new"])},
    ]
    template = ImmutableSandboxedEnvironment().from_string(info.chat_template)
    prompt = template.render(messages=messages, add_generation_prompt=True)

    assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.startswith("<|im_start|>user\n!fake ")
    assert pieces(backend, clock, prompt) == [b"<|im_end|>", b"new"]


@pytest.mark.parametrize("prompt", ["say !fake {}", "!fakery", "a !fake {", "! fake {"])
def test_what_is_not_a_line_of_its_own_is_no_script(make, clock, prompt):
    assert pieces(make(), clock, prompt, steps=1) == [b" tok0"]


@pytest.mark.parametrize(
    "line",
    [
        "!fake not json",
        "!fake {",
        "!fake []",
        "!fake {} trailing",
        '!fake {"tokns": ["a"]}',
        '!fake {"tokens": "a"}',
        '!fake {"tokens": [1]}',
        '!fake {"tokens": [{"hex": "f0f"}]}',
        '!fake {"tokens": [{"hex": "zz"}]}',
        '!fake {"tokens": [{"hax": "00"}]}',
        '!fake {"tokens": ["a"], "repeat": 0}',
        '!fake {"tokens": ["a"], "repeat": true}',
        '!fake {"repeat": 2}',
        '!fake {"tokens": ["a"], "echo": true}',
        '!fake {"token_latency": -1}',
        '!fake {"token_latency": 1e999}',
        '!fake {"token_latency": "1"}',
        '!fake {"prefill_latency": 1}',
        '!fake {"prefill_steps": 1.5}',
        '!fake {"die_at": -1}',
        '!fake {"die_at": 1, "signal": 65}',
        '!fake {"signal": 9, "signal": 11}',
        '!fake {"logprob": 0.5}',
        '!fake {"logprob": "inf"}',
        '!fake {"logprob": -1e999}',
        json.dumps({"tokens": ["a" * (1 << 20)]}).join(["!fake ", ""]),
        json.dumps({"tokens": ["a"] * 65_537}).join(["!fake ", ""]),
    ],
)
def test_a_bad_script_is_the_callers_fault_and_leaves_nothing_behind(make, line):
    backend = make()

    with pytest.raises(InvalidRequest) as raised:
        add(backend, f"before\n{line}\nafter")

    assert raised.value.param == "prompt"
    assert len(raised.value.message) < 300
    assert backend.poll_interval is None
    assert backend.step() == []


def test_a_logprob_costs_a_request_nothing_that_did_not_ask(make, clock):
    assert pieces(make(), clock, script(tokens=["a"], logprob=-0.5)) == [b"a"]


@pytest.mark.parametrize(("scripted", "given"), [(None, 0.0), (-0.5, -0.5), ("-inf", -math.inf)])
def test_every_token_has_the_scripted_logprob_and_others_have_none(make, scripted, given):
    backend = make()
    sequence = add(backend, script(tokens=["a", "b"], logprob=scripted), logprobs=3)
    for piece, end in ((b"a", False), (b"b", True)):
        top = [(piece, given), (b" alt1", -math.inf), (b" alt2", -math.inf)]
        assert backend.step() == [Scored(sequence, Score(piece, given, top), end)]
    backend.remove(sequence)


def test_a_scored_prompt_comes_before_the_answer_and_a_scripted_error_after_it(make):
    backend = make()
    prompt = script(error_at=1, logprob=-2)
    sequence = add(backend, prompt, logprobs=0, echo=True)
    (event,) = backend.step()
    assert isinstance(event, PromptScored)
    assert b"".join(score.piece for score in event.scores).decode() == prompt
    assert [score.logprob for score in event.scores] == [None] + [-2.0] * (len(event.scores) - 1)
    assert backend.step() == [SequenceFailed(sequence, "the script failed this sequence at token 1")]
