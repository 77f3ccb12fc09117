"""How a body says what its answer must look like."""

from __future__ import annotations

import json

import pytest
from schema_cases import refused, work

from slimproc.http.openai.chat_schema import parse_chat
from slimproc.http.openai.completions_schema import parse_completion
from slimproc.http.openai.structure import MAX_SCHEMA
from slimproc.request import GrammarSpec

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TEXT = json.dumps(SCHEMA)
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
NAMED = {"name": "n", "schema": SCHEMA}


def grammar(**fields) -> GrammarSpec | None:
    """Of both routes, which agree."""
    chat = work(parse_chat(json.dumps(CHAT | fields).encode())).grammar
    completion = work(parse_completion(json.dumps({"prompt": "hi"} | fields).encode())).grammar
    assert chat == completion
    return chat


def refusal(**fields):
    return refused(parse_chat, CHAT | fields)


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", TEXT),
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, "json_schema", TEXT),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED | {"strict": True, "description": "d"}}},
            "json_schema",
            TEXT,
        ),
        ({"json_schema": SCHEMA}, "json_schema", TEXT),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"guided_json": SCHEMA}, "json_schema", TEXT),
        ({"guided_json": TEXT}, "json_schema", TEXT),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"guided_choice": ["é", "b"]}, "choice", '["é","b"]'),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", TEXT),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type":"object"}'),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", '["a"]'),
    ],
)
def test_every_way_to_say_it_becomes_one_spec_that_names_its_field(fields, kind, text):
    (field,) = fields
    assert grammar(**fields) == GrammarSpec(kind, text, field)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"guided_json": None, "json_schema": None, "grammar": None},
        {"response_format": {"type": "text"}, "structured_outputs": None},
    ],
)
def test_text_and_null_ask_for_nothing(fields):
    assert grammar(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": SCHEMA, "grammar": 'start: "a"'}, "grammar"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"guided_choice": ["a"], "structured_outputs": {"regex": "a"}}, "guided_choice"),
    ],
)
def test_two_of_them_are_refused(fields, param):
    error = refusal(**fields)
    assert error.param == param
    assert "only one" in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n" * 65, "schema": {}}}},
            "response_format.json_schema.name",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": []}}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": 1}}, "response_format"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_json": True}, "guided_json"),
        ({"guided_regex": 1}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_choice": ["a"] * 1001}, "guided_choice"),
        ({"grammar": ""}, "grammar"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_name(fields, param):
    assert refusal(**fields).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": {"enum": ["x" * MAX_SCHEMA]}}, "guided_json"),
        ({"guided_regex": "a" * (16 * 1024 + 1)}, "guided_regex"),
        ({"grammar": "a" * (64 * 1024 + 1)}, "grammar"),
        ({"guided_choice": ["x" * 900] * 20}, "guided_choice"),
    ],
)
def test_what_is_too_large_is_refused_before_any_engine_hears_of_it(fields, param):
    assert refusal(**fields).param == param


def test_a_schema_of_any_size_up_to_the_limit_is_taken_as_it_stands():
    schema = '{"enum": ["' + "x" * (MAX_SCHEMA - 15) + '"] }'
    body = b'{"prompt": "hi", "guided_json": ' + schema.encode() + b"}"
    assert work(parse_completion(body)).grammar.text == schema
