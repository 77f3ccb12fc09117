"""Hostile and broken JSON: refused with 400, in bounded time, before anything else sees it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from schema_cases import refused

from slimproc.http.decode import decode
from slimproc.http.openai.chat_schema import parse_chat
from slimproc.http.openai.completions_schema import parse_completion


def chat(extra: bytes = b"", content: bytes = b'"hi"') -> bytes:
    return b'{"messages":[{"role":"user","content":' + content + b"}]" + (b"," + extra if extra else b"") + b"}"


HOSTILE = {
    "empty": b"",
    "blank": b"  \n",
    "array bombs": b"[" * 100_000,
    "object bombs": b'{"a":' * 100_000,
    "deep unknown field": chat(b'"x":' + b"[" * 100_000 + b"]" * 100_000),
    "deep message": b'{"messages":' + b"[" * 100_000,
    "not UTF-8": b"\xff\xfe",
    "UTF-16": '{"messages":[]}'.encode("utf-16"),
    "GBK": '{"messages":[{"role":"user","content":"你好"}]}'.encode("gbk"),
    "bad UTF-8 in an unknown field": chat(b'"x":"\xff"'),
    "bad UTF-8 in a key": chat(b'"\xff":1'),
    "encoded surrogate": chat(content=b'"\xed\xa0\x80"'),
    "overlong": chat(content=b'"\xc0\xaf"'),
    "trailing comma": b'{"model":"x",}',
    "no key": b"{:",
    "cut off": chat()[:-3],
    "text after it": chat() + b"x",
    "two objects": chat() + chat(),
    "comment": b'{"model":"m",/**/"messages":[]}',
    "single quotes": b"{'model':'m'}",
    "raw control character": chat(content=b'"a\nb"'),
    "lone high surrogate": chat(content=rb'"\ud800"'),
    "lone high surrogate in the middle": chat(content=rb'"a\ud800b and so on"'),
    "lone low surrogate": chat(content=rb'"\udc00"'),
    "surrogates the wrong way round": chat(content=rb'"\udc00\ud800"'),
    "NUL": chat(content=rb'"a\u0000b"'),
    "NUL behind a backslash": chat(content=rb'"\\\u0000"'),
    "NUL in an unknown field": chat(b'"x":"\\u0000"'),
    "array": b"[]",
    "string": b'"x"',
    "null": b"null",
    "number": b"1",
    "100,000 keys": b"{" + b",".join(b'"%d":1' % number for number in range(100_000)) + b"}",
    "1,000 levels of tools": chat(
        b'"tools":[{"function":{"parameters":' + b'{"a":' * 1000 + b"1" + b"}" * 1000 + b"}}]"
    ),
    "too many messages": b'{"messages":[' + b",".join([b'{"role":"user","content":""}'] * 50_000) + b"]}",
}


@pytest.mark.timeout(5)
@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_a_hostile_body_is_refused(parse, body):
    error = refused(parse, body)
    assert error.message
    assert "msgspec" not in error.message
    assert "$" not in error.message


@pytest.mark.parametrize("body", [b"", b"  \r\n\t"])
def test_a_body_with_nothing_in_it_is_told_to_be_empty(body):
    assert refused(parse_chat, body).message == "the body is empty; a JSON object is needed"


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        (b'"model":"a","model":"b"', "model"),
        (b'"model":"a","mod\\u0065l":"b"', "model"),
        (b'"messages":[{"role":"user","content":"x"}]', "messages"),
        (b'"x_unknown":1,"x_unknown":1', "x_unknown"),
    ],
)
def test_the_same_key_twice_is_refused_and_named(extra, name):
    error = refused(parse_chat, chat(extra))
    assert (error.param, error.message) == (name, f"the key {name!r} is there twice")


def test_inside_nested_objects_the_last_of_two_keys_wins():
    body = b'{"messages":[{"role":"user","content":"first","content":"last"}]}'
    assert parse_chat(body).prompts[0].messages == [{"role": "user", "content": "last"}]


def test_a_nul_only_written_about_is_text():
    r"""``"\\u0000"`` in JSON is a backslash and five characters, as in a prompt that quotes code."""
    assert parse_chat(chat(content=rb'"\\u0000"')).prompts[0].messages[0]["content"] == r"\u0000"


def test_surrogate_pairs_are_one_character():
    assert parse_chat(chat(content=rb'"\ud83d\ude00"')).prompts[0].messages[0]["content"] == "\U0001f600"


def test_moderate_nesting_in_a_field_that_nobody_reads_is_harmless():
    parse_chat(chat(b'"metadata":' + b"[" * 200 + b"]" * 200))


class Inner(msgspec.Struct):
    number: int
    names: list[str] = []


class Outer(msgspec.Struct):
    inner: list[Inner] | None = None
    table: dict[str, Inner] | None = None
    flag: bool | None = None


outer = msgspec.json.Decoder(Outer)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"flag": 1}, "flag", "flag: expected boolean or null, got integer"),
        ({"inner": {}}, "inner", "inner: expected array or null, got object"),
        ({"inner": [{"number": 1}, 2]}, "inner[1]", "inner[1]: expected object, got integer"),
        ({"inner": [{"number": 1}, {}]}, "inner[1].number", "inner[1].number: is required"),
        ({"inner": [{"number": "x"}]}, "inner[0].number", "inner[0].number: expected integer, got string"),
        (
            {"inner": [{"number": 1, "names": ["a", 2]}]},
            "inner[0].names",
            "inner[0].names[1]: expected string, got integer",
        ),
        ({"table": {"k": {"number": 1.5}}}, "table", "table: expected integer, got number"),
        ([], None, "the body: expected object, got array"),
    ],
)
def test_a_wrong_field_is_named_by_its_path_in_jsons_words(body: Any, param: str | None, message: str):
    error = refused(lambda raw: decode(raw, outer), json.dumps(body).encode())
    assert (error.param, error.message) == (param, message)


@pytest.mark.timeout(5)
def test_a_body_of_four_mebibytes_is_decoded():
    big = json.dumps({"prompt": "x" * (4 << 20)}).encode()
    assert len(parse_completion(big).prompts[0]) == 4 << 20
