"""Grammars for tests, and what hostile or mistaken callers send: by what is wrong with each."""

from __future__ import annotations

import json

from slimproc.engines.grammar import library
from slimproc.engines.grammar.matcher import GrammarMatcher
from slimproc.engines.grammar.vocabulary import GrammarVocabulary
from slimproc.request import GrammarSpec

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CHAIN = 3000
"""References behind one another: more than a native stack of 8 MiB takes."""


def nested(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


def chained(count: int) -> dict:
    links = {f"a{number}": {"$ref": f"#/$defs/a{number + 1}"} for number in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": links | {f"a{count}": {"type": "string"}}}


BAD_SCHEMAS = {
    "an unknown type": {"type": "strin"},
    "a bad regular expression": {"type": "string", "pattern": "(["},
    "a regular expression that looks ahead": {"type": "string", "pattern": "(?=a)b"},
    "a reference to nothing": {"$ref": "#/definitions/nothing"},
    "a reference to somewhere else": {"$ref": "https://example.com/schema.json"},
    "only a reference to itself": {"$ref": "#"},
    "a circle of references": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "nothing is allowed": {"not": {}},
    "contradicting bounds": {"type": "integer", "minimum": 5, "maximum": 3},
    "a keyword that is not implemented": {"type": "array", "uniqueItems": True},
    "that keyword, and the wish to overlook it": {
        "type": "array",
        "uniqueItems": True,
        "x-guidance": {"lenient": True},
    },
    "200 levels": nested(200),
    "a chain of references that overflows the native stack": chained(CHAIN),
}
BAD_TEXTS = {
    "a bad regular expression": ("regex", "(["),
    "a million repetitions, which the library gives up on the way": ("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "8,000 parentheses": ("regex", "(" * 8000 + "a" + ")" * 8000),
    "an unknown name": ("grammar", "start: nothing"),
    "a rule that never ends": ("grammar", "start: start"),
    "20,000 parentheses": ("grammar", "start: " + "(" * 20000 + '"a"' + ")" * 20000),
    "GBNF, and an unknown rule": ("grammar", "root ::= nothing"),
    "GBNF, and 20,000 parentheses": ("grammar", "root ::= " + "(" * 20000 + '"a"' + ")" * 20000),
    "a chain of rules that overflows the native stack": (
        "grammar",
        "start: a0\n" + "".join(f'a{n}: a{n + 1} "x"\n' for n in range(CHAIN)) + f'a{CHAIN}: "y"\n',
    ),
}
ENDLESS = {"type": "integer", "multipleOf": 999983}
"""Ten seconds and 400 MB, if one lets it."""


def schema(value: object, param: str = "response_format") -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(value), param)


def byte_vocabulary() -> GrammarVocabulary:
    """Three control tokens, of which the last is the end, and all bytes."""
    return GrammarVocabulary([b"", b"", b"", *(bytes([byte]) for byte in range(256))], [2])


def matcher_of(spec: GrammarSpec, vocabulary: GrammarVocabulary) -> GrammarMatcher:
    """Compiled here and now, without a checker: only for what is harmless."""
    tokenizer = library.make_tokenizer(vocabulary)
    compiled = library.compile_grammar(tokenizer, library.translate(spec))
    return GrammarMatcher(compiled, len(vocabulary.tokens))


def valid(text: str, against: dict) -> bool:
    """Whether ``text`` is JSON that ``against`` allows; knows the keywords that the tests use."""
    try:
        return _valid(json.loads(text), against)
    except ValueError:
        return False


def _valid(value: object, schema: dict) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    match schema["type"]:
        case "object":
            known = schema.get("properties", {})
            return (
                isinstance(value, dict)
                and set(schema.get("required", ())) <= set(value)
                and (schema.get("additionalProperties", True) or set(value) <= set(known))
                and all(_valid(value[key], known[key]) for key in set(value) & set(known))
            )
        case "array":
            return (
                isinstance(value, list)
                and schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
                and all(_valid(item, schema["items"]) for item in value)
            )
        case "string":
            return isinstance(value, str) and len(value) <= schema.get("maxLength", len(value))
        case "integer":
            return (
                isinstance(value, int)
                and not isinstance(value, bool)
                and schema.get("minimum", value) <= value <= schema.get("maximum", value)
            )
    raise AssertionError(schema)
