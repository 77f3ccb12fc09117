"""The fields by which a caller says what an answer must look like: OpenAI's, vLLM's, llama-server's; one at most.

Nothing of it is written into the prompt: a model that should know what is wanted of it is told so by its caller.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from slimproc.errors import InvalidRequest
from slimproc.http.decode import given, unsupported
from slimproc.request import GrammarSpec

MAX_SCHEMA: Final = 256 << 10
"""Bytes of JSON. How deep it nests is the compiler's to bound (128 levels)."""

_Kind = Literal["json_schema", "regex", "grammar", "choice"]

Regex = Annotated[str, Meta(max_length=16 << 10)]
Grammar = Annotated[str, Meta(min_length=1, max_length=64 << 10)]
Choice = Annotated[list[Annotated[str, Meta(min_length=1, max_length=1000)]], Meta(min_length=1, max_length=1000)]
_MAX_CHOICES: Final = 16 << 10
"""Characters of all choices together."""

_ANY_OBJECT: Final = '{"type":"object"}'


class JsonSchema(msgspec.Struct):
    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
    schema: msgspec.Raw = msgspec.Raw()
    strict: bool | None = None
    """The schema is kept either way."""
    description: str | None = None


class ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: msgspec.Raw = msgspec.Raw()
    """llama-server's and others' word beside ``json_object``."""


class StructuredOutputs(msgspec.Struct):
    """vLLM's."""

    json: msgspec.Raw = msgspec.Raw()
    regex: Regex | None = None
    grammar: Grammar | None = None
    choice: Choice | None = None
    json_object: bool | None = None
    structural_tag: msgspec.Raw = msgspec.Raw()


class StructureFields(msgspec.Struct, kw_only=True):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = msgspec.Raw()
    guided_regex: Regex | None = None
    guided_grammar: Grammar | None = None
    guided_choice: Choice | None = None
    json_schema: msgspec.Raw = msgspec.Raw()
    grammar: Grammar | None = None

    def structure(self) -> GrammarSpec | None:
        """The one thing that is asked for, if any. Raises InvalidRequest."""
        specs = [*self._openai(), *self._vllm(), *self._by_name()]
        if len(specs) > 1:
            raise InvalidRequest(
                f"{specs[1].param}: {specs[0].param} is there as well, and an answer can follow only one",
                param=specs[1].param,
            )
        return specs[0] if specs else None

    def _openai(self) -> Iterator[GrammarSpec]:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return
        field = "response_format"
        if wanted.type == "json_object":
            yield _schema(field, "schema", wanted.schema) if given(wanted.schema) else _object(field)
            return
        if wanted.json_schema is None:
            raise InvalidRequest("response_format.json_schema: is required", param="response_format.json_schema")
        if not given(wanted.json_schema.schema):
            param = "response_format.json_schema.schema"
            raise InvalidRequest(f"{param}: is required", param=param)
        yield _schema(field, "json_schema.schema", wanted.json_schema.schema)

    def _vllm(self) -> Iterator[GrammarSpec]:
        wanted = self.structured_outputs
        if wanted is None:
            return
        field = "structured_outputs"
        if given(wanted.structural_tag):
            raise unsupported(f"{field}.structural_tag")
        specs = [*_texts(field, regex=wanted.regex, grammar=wanted.grammar), *_choices(field, wanted.choice)]
        if given(wanted.json):
            specs.append(_schema(field, "json", wanted.json))
        if wanted.json_object:
            specs.append(_object(field))
        if not specs:
            raise InvalidRequest(f"{field}: needs json, json_object, regex, grammar or choice", param=field)
        yield from specs

    def _by_name(self) -> Iterator[GrammarSpec]:
        for field in ("guided_json", "json_schema"):
            if given(getattr(self, field)):
                yield _schema(field, "", getattr(self, field))
        yield from _texts("guided_regex", regex=self.guided_regex)
        yield from _texts("guided_grammar", grammar=self.guided_grammar)
        yield from _texts("grammar", grammar=self.grammar)
        yield from _choices("guided_choice", self.guided_choice)


def _object(field: str) -> GrammarSpec:
    return GrammarSpec("json_schema", _ANY_OBJECT, field)


def _texts(field: str, **texts: str | None) -> Iterator[GrammarSpec]:
    kinds: dict[str, _Kind] = {"regex": "regex", "grammar": "grammar"}
    for name, text in texts.items():
        if text is not None:
            yield GrammarSpec(kinds[name], text, field)


def _choices(field: str, choices: list[str] | None) -> Iterator[GrammarSpec]:
    if choices is None:
        return
    if sum(map(len, choices)) > _MAX_CHOICES:
        raise InvalidRequest(f"{field}: the choices have more than {_MAX_CHOICES} characters", param=field)
    yield GrammarSpec("choice", msgspec.json.encode(choices).decode(), field)


def _schema(field: str, place: str, value: msgspec.Raw) -> GrammarSpec:
    """A JSON object, or (vLLM's habit) a string that holds one. What it means is for the compiler to say."""
    param = f"{field}.{place}".rstrip(".")
    raw = bytes(value)
    if len(raw) > MAX_SCHEMA:
        raise InvalidRequest(f"{param}: has {len(raw)} bytes; the limit is {MAX_SCHEMA}", param=field)
    text = msgspec.json.decode(raw, type=str) if raw.startswith(b'"') else raw.decode()
    try:
        text = bytes(msgspec.json.decode(text, type=msgspec.Raw)).decode()
    except (msgspec.DecodeError, RecursionError):
        text = ""
    if not text.startswith("{"):
        raise InvalidRequest(f"{param}: expected object (a JSON Schema)", param=field)
    return GrammarSpec("json_schema", text, field)
