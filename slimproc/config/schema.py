"""The configuration file as a JSON Schema, for editors: made of the kinds and the tables that the parser reads it by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from slimproc.config.blocks import BLOCKS, POLICY, Block
from slimproc.config.model import (
    ANY_NAME,
    LIFECYCLE_KEYS,
    LOCAL_ENDPOINTS,
    LOCAL_KEYS,
    MODEL_KINDS,
    UPSTREAM_KEYS,
    ModelConfig,
)
from slimproc.config.models import INHERITED
from slimproc.config.scopes import SERVERS
from slimproc.config.upstream import Command, MemoryPolicy, MemoryProfile, Remote
from slimproc.config.values import NAME, Kind, Listen
from slimproc.config.whole import KINDS, Config
from slimproc.settings import BACKENDS, FakeSettings

Schema = dict[str, Any]
Struct = type[msgspec.Struct]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
ELSEWHERE = (*INHERITED, "max_queue", "inference_path")
"""Keys of a model whose default is another setting's value, or depends on what serves the model."""
_STRUCTS: dict[str, Struct] = {"fake": FakeSettings, "memory": MemoryProfile, "remote": Remote, "command": Command}
_NO_CONTRACT: Schema = {"properties": {"contract": {"const": "none"}}, "required": ["contract"]}


def schema() -> Schema:
    """Draft 2020-12. It takes every configuration that is right, and some that are not: what values must be to each
    other, and what hides inside a text, is ``check-config``'s alone.
    """
    model = _mapping(MODEL_KINDS, ModelConfig, {key: _block(block, _STRUCTS[key]) for key, block in BLOCKS.items()})
    for key in ELSEWHERE:
        model["properties"][key].pop("default", None)
    model["properties"]["remote"] |= {
        "if": _NO_CONTRACT,
        "then": _without(["prepare"]),
        "else": _without(["health_path"]),
    }
    models = {
        "description": "the models, by the name that callers use: at least one",
        "type": "object",
        "minProperties": 1,
        "propertyNames": {**NAME.schema, "not": {"const": ANY_NAME}},
        "additionalProperties": {"$ref": "#/$defs/model"},
    }
    whole = _mapping(KINDS, Config, {"models": models, "memory": _block(POLICY, MemoryPolicy)}, ("models",))
    return {"$schema": DIALECT, "title": "slimproc.yaml", **whole, "$defs": {"model": model | {"allOf": [*_rules()]}}}


def _mapping(
    kinds: Mapping[str, Kind[Any]], struct: Struct | None, blocks: Mapping[str, Schema], required: Iterable[str] = ()
) -> Schema:
    """``struct`` has the defaults, where there are any."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(struct)} if struct else {}
    values = {key: _value(kind, defaults.get(key)) for key, kind in kinds.items()}
    return {
        "type": "object",
        "properties": {**values, **blocks},
        "required": list(required),
        "additionalProperties": False,
    }


def _value(kind: Kind[Any], default: object) -> Schema:
    described = {"description": kind.wanted, **kind.schema}
    if default in (msgspec.NODEFAULT, None, ""):
        return described
    return described | {"default": str(default) if isinstance(default, Listen) else default}


def _block(block: Block[Any], struct: Struct | None = None) -> Schema:
    inner = {key: _block(one) for key, one in block.blocks.items()}
    return {"description": block.what, **_mapping(block.kinds, struct, inner, block.required)}


def _rules() -> Iterator[Schema]:
    """What ``scopes.py`` checks in a model, as far as it is about which keys are there."""
    yield {"oneOf": [{"required": [key]} for key in SERVERS]}
    local = _without(UPSTREAM_KEYS)
    local["properties"]["inference_path"] = {"enum": list(LOCAL_ENDPOINTS)}
    yield {"if": {"required": ["backend"]}, "then": local}
    for backend, traits in BACKENDS.items():
        foreign = set().union(*(its.own_keys for other, its in BACKENDS.items() if other != backend))
        yield {
            "if": {"properties": {"backend": {"const": backend}}, "required": ["backend"]},
            "then": {"required": ["path"], **_without(foreign)} if traits.has_file else _without({"path", *foreign}),
        }
    for server in SERVERS[1:]:
        then = {"required": ["inference_path", "max_body"], **_without(LOCAL_KEYS)}
        yield {"if": {"required": [server]}, "then": then}
    yield {"if": {"required": ["command"]}, "then": _without(["prepare_timeout"])}
    yield {
        "if": {"required": ["prepare_timeout", "remote"]},
        "then": {"properties": {"remote": {"required": ["prepare"]}}},
    }
    yield {
        "if": {"properties": {"remote": _NO_CONTRACT}, "required": ["remote"]},
        "then": _without(LIFECYCLE_KEYS),
        "else": {"anyOf": [{"required": ["backend"]}, {"required": ["memory"]}]},
    }


def _without(keys: Iterable[str]) -> Schema:
    return {"properties": dict.fromkeys(sorted(keys), False)}
