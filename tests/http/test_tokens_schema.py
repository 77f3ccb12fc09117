"""The bodies of /tokenize and /detokenize."""

from __future__ import annotations

import json

import pytest
from schema_cases import refused

from slimproc.http.openai.tokens_schema import DetokenizeCall, TokenizeCall, parse_detokenize, parse_tokenize


@pytest.mark.parametrize(
    ("body", "call"),
    [
        ({"content": "x"}, TokenizeCall(None, "x", add_special=False, parse_special=True)),
        ({"prompt": "x", "model": "m"}, TokenizeCall("m", "x", add_special=False, parse_special=True)),
        ({"content": ""}, TokenizeCall(None, "", add_special=False, parse_special=True)),
        ({"content": "x", "prompt": None}, TokenizeCall(None, "x", add_special=False, parse_special=True)),
        (
            {"content": "x", "add_special": True, "parse_special": False},
            TokenizeCall(None, "x", add_special=True, parse_special=False),
        ),
        (
            {"content": "x", "add_special": None, "parse_special": None, "with_pieces": False, "other": 1},
            TokenizeCall(None, "x", add_special=False, parse_special=True),
        ),
    ],
)
def test_tokenize_takes_llama_servers_names_and_vllms_prompt(body, call):
    assert parse_tokenize(json.dumps(body).encode()) == call


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "content"),
        ({"content": None}, "content"),
        ({"content": 1}, "content"),
        ({"content": ["x"]}, "content"),
        ({"content": "x", "prompt": "x"}, "prompt"),
        ({"content": "x", "add_special": 1}, "add_special"),
        ({"content": "x", "parse_special": "no"}, "parse_special"),
        ({"content": "x", "with_pieces": True}, "with_pieces"),
        ({"content": "x", "model": 1}, "model"),
    ],
)
def test_a_bad_tokenize_is_refused_naming_the_field(body, param):
    assert refused(parse_tokenize, body).param == param


@pytest.mark.parametrize("tokens", [[], [0], [1, 2, 2**31 - 1]])
def test_detokenize_takes_token_ids(tokens):
    assert parse_detokenize(json.dumps({"tokens": tokens, "model": "m"}).encode()) == DetokenizeCall("m", tokens)


@pytest.mark.parametrize("tokens", [None, 1, "1", ["1"], [1.0], [-1], [2**31], [True], [[1]]])
def test_a_bad_list_of_tokens_is_refused(tokens):
    assert refused(parse_detokenize, {"tokens": tokens}).param == "tokens"


def test_tokens_are_required():
    assert refused(parse_detokenize, {}).param == "tokens"
