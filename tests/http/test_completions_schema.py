"""The body of /v1/completions, field by field: what is taken, what it means, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from schema_cases import BAD_FIELD_CASES, OPTIONAL, RAW_NUMBERS, Limits, refused, work

from slimproc.errors import InvalidRequest
from slimproc.http.openai.completions_schema import CompletionBody, parse_completion
from slimproc.http.openai.fields import MAX_TOKENS, GenerationFields
from slimproc.request import Deadline, SamplingParams


def parse(**fields: Any):
    return parse_completion(json.dumps({"prompt": "p"} | fields).encode())


def test_a_prompt_alone_means_openais_defaults():
    request = work(parse())
    assert request.prompts == ["p"]
    assert (request.n, request.max_tokens, request.stop, request.echo) == (1, 16, (), False)
    assert request.sampling == SamplingParams()
    assert request.sampling.seed is None
    call = parse()
    assert (call.model, call.stream, call.include_usage) == (None, False, False)


def test_the_work_carries_the_id_the_models_own_name_and_the_deadline():
    call = parse(model="alias")
    request = call.work(request_id="r1", model=Limits("real"), deadline=Deadline(5.0))
    assert (call.model, request.id, request.model, request.deadline) == ("alias", "r1", "real", Deadline(5.0))


def test_every_parameter_arrives():
    request = work(
        parse(
            n=2,
            max_tokens=7,
            echo=True,
            stop=["a", "b"],
            temperature=0,
            top_p=0.5,
            top_k=40,
            min_p=0.1,
            seed=-5,
            presence_penalty=-2,
            frequency_penalty=2,
            repetition_penalty=1.1,
            logit_bias={"5": -100, "0": 1.5},
            ignore_eos=True,
        )
    )
    assert (request.n, request.max_tokens, request.echo, request.stop) == (2, 7, True, ("a", "b"))
    assert request.sampling == SamplingParams(
        temperature=0.0, top_p=0.5, top_k=40, min_p=0.1, seed=-5, presence_penalty=-2.0, frequency_penalty=2.0,
        repetition_penalty=1.1, logit_bias={5: -100.0, 0: 1.5}, ignore_eos=True,
    )  # fmt: skip


def test_every_sampling_parameter_has_a_field_of_its_name():
    assert set(SamplingParams.__struct_fields__) <= set(GenerationFields.__struct_fields__)


def test_null_is_the_same_as_absent_for_every_optional_field():
    nulls = dict.fromkeys([*OPTIONAL, "echo", "best_of", "suffix", "logprobs"])
    assert set(nulls) | {"prompt"} == set(CompletionBody.__struct_fields__)
    assert parse(**nulls) == parse()


# --- prompts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b", "c"], ["a", "b", "c"]),
        ([""], [""]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([0], [[0]]),
        ([2**31 - 1], [[2**31 - 1]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["x"] * 128, ["x"] * 128),
        ([[1]] * 128, [[1]] * 128),
        ([7] * 5000, [[7] * 5000]),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_prompt_has_four_forms(prompt, prompts):
    assert work(parse(prompt=prompt)).prompts == prompts


def test_space_inside_a_list_does_not_change_its_form():
    assert parse_completion(b'{ "prompt" : \n [ \t\n "a" , "b" ] }').prompts == ["a", "b"]
    assert parse_completion(b'{"prompt":[ [ 1 ] ]}').prompts == [[1]]


@pytest.mark.parametrize(
    "prompt",
    [
        [], [[]], [[1], []], None, {}, 5, True, ["a", 1], [1, "a"], [[1], "a"], [[1], 2], [1, [2]], ["a", ["b"]],
        [["a"]], [[["a"]]], [1.5], [[1.0]], [True], [None], [{}], [-1], [[-1]], [2**31], ["x"] * 129, [[1]] * 129,
        ["x"] * 1000,
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_any_other_prompt_is_refused_whole_naming_it(prompt):
    assert refused(parse_completion, {"prompt": prompt}).param == "prompt"


def test_no_prompt_is_refused():
    error = refused(parse_completion, {"model": "m"})
    assert (error.param, error.message) == ("prompt", "prompt: is required")


def test_the_message_says_which_item_is_wrong():
    assert refused(parse_completion, {"prompt": ["a", 1]}).message == "prompt[1]: expected string, got integer"


@pytest.mark.parametrize(
    ("prompts", "n", "fits"), [(1, 128, True), (64, 2, True), (64, 3, False), (2, 65, False), (128, 1, True)]
)
def test_a_request_asks_for_at_most_128_sequences(prompts, n, fits):
    fields = {"prompt": ["x"] * prompts, "n": n}
    if fits:
        assert work(parse(**fields)).sequences == prompts * n
    else:
        assert refused(parse_completion, fields).param == "n"


# --- how many tokens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "tokens"),
    [
        ("null", 16),
        ("0", 0),
        ("1", 1),
        ("5.0", 5),
        ("-0", 0),
        ("2147483648", MAX_TOKENS),
        ("1e18", MAX_TOKENS),
        ("1" + "0" * 30, MAX_TOKENS),
    ],
)
def test_max_tokens_is_a_whole_number_cut_to_31_bits(raw, tokens):
    assert work(parse_completion(f'{{"prompt":"p","max_tokens":{raw}}}'.encode())).max_tokens == tokens


def test_more_than_the_models_limit_is_refused_and_the_default_is_cut_to_it():
    assert work(parse(max_tokens=8), limit=8).max_tokens == 8
    assert work(parse(), limit=8).max_tokens == 8
    assert work(parse(), limit=100).max_tokens == 16
    with pytest.raises(InvalidRequest, match="limit of 8") as caught:
        work(parse(max_tokens=9), limit=8)
    assert caught.value.param == "max_tokens"


# --- the rest ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "stops"),
    [
        (None, ()),
        ([], ()),
        ("x", ("x",)),
        (["x", "y"], ("x", "y")),
        (["x"] * 16, ("x",) * 16),
        ("x" * 1000, ("x" * 1000,)),
    ],
)
def test_stop_is_nothing_a_string_or_up_to_16(stop, stops):
    assert work(parse(stop=stop)).stop == stops


@pytest.mark.parametrize(("seed", "taken"), [(0, 0), (1.0, 1), (-1, -1), (2**63 - 1, 2**63 - 1), (-(2**63), -(2**63))])
def test_a_seed_has_64_bits_and_may_be_an_integral_float(seed, taken):
    seen = work(parse(seed=seed)).sampling.seed
    assert (seen, type(seen)) == (taken, int)


@pytest.mark.parametrize(("top_k", "taken"), [(0, 0), (-1, 0), (1, 1), (2**31 - 1, 2**31 - 1)])
def test_top_k_is_off_by_0_and_by_minus_1(top_k, taken):
    assert work(parse(top_k=top_k)).sampling.top_k == taken


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"stream": True}, False),
        ({"stream": True, "stream_options": None}, False),
        ({"stream": True, "stream_options": {}}, False),
        ({"stream": True, "stream_options": {"include_usage": False}}, False),
        ({"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": True}}, False),
        ({"stream": True, "stream_options": {"include_usage": True}}, True),
    ],
)
def test_usage_on_a_stream_comes_when_it_is_asked_for(fields, wanted):
    call = parse(**fields)
    assert (call.stream, call.include_usage) == (True, wanted)


@pytest.mark.parametrize("stream", [False, None])
def test_stream_options_without_a_stream_are_refused(stream):
    fields = {"prompt": "p", "stream": stream, "stream_options": {"include_usage": True}}
    assert refused(parse_completion, fields).param == "stream_options"


def test_a_wrong_stream_option_is_named_by_its_path():
    fields = {"prompt": "p", "stream": True, "stream_options": {"include_usage": "yes"}}
    assert refused(parse_completion, fields).param == "stream_options.include_usage"


@pytest.mark.parametrize(("name", "value"), BAD_FIELD_CASES)
def test_a_known_field_with_a_bad_value_is_refused_naming_it(name, value):
    error = refused(parse_completion, {"prompt": "p", name: value})
    assert error.param == name
    assert error.message.startswith((name, f"a key of {name}"))


@pytest.mark.parametrize("raw", RAW_NUMBERS, ids=lambda raw: raw[:10].decode())
@pytest.mark.parametrize("name", ["temperature", "seed", "n", "max_tokens"])
def test_what_is_no_number_and_what_is_too_large_to_be_one_is_refused(name, raw):
    refused(parse_completion, b'{"prompt":"p","' + name.encode() + b'":' + raw + b"}")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix", "x"),
        ("suffix", ""),
        ("best_of", 3),
        ("best_of", 0),
    ],
)
def test_meanings_that_are_not_there_yet_are_refused_naming_them(name, value):
    error = refused(parse_completion, {"prompt": "p", name: value})
    assert error.param == name
    assert "support" in error.message


@pytest.mark.parametrize(("name", "value"), [("echo", 1), ("best_of", "x"), ("suffix", 1), ("logprobs", "x")])
def test_the_routes_own_fields_have_types_too(name, value):
    assert refused(parse_completion, {"prompt": "p", name: value}).param == name


@pytest.mark.parametrize(
    "fields", [{"logprobs": False}, {"best_of": 1}, {"n": 3, "best_of": 3}, {"n": 3, "best_of": 1}]
)
def test_their_harmless_values_pass(fields):
    parse(**fields)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_asks_for_up_to_five_alternatives_and_0_for_the_tokens_alone(count):
    assert parse(logprobs=count).logprobs == count


@pytest.mark.parametrize("value", [-1, 6, 1.5, "2", True, [1], 10**30])
def test_other_logprobs_are_refused_by_name(value):
    assert refused(parse_completion, {"prompt": "p", "logprobs": value}).param == "logprobs"


def test_without_logprobs_there_are_none():
    assert parse().logprobs is parse(logprobs=None).logprobs is parse(logprobs=False).logprobs is None


def test_unknown_fields_are_ignored():
    assert parse(user="u", metadata={"a": [1]}, store=True, service_tier="auto", x_foo=None, temprature=0) == parse()
