"""Kinds whose values are lists or free mappings: a command line, an environment, devices, adapters."""

from __future__ import annotations

import math
import re
from typing import Any

from slimproc.config.problems import clip, shown
from slimproc.config.values import NAME, PATH, Kind, Wrong, list_of
from slimproc.settings import LoraAdapter

PORT_VARIABLE = "${PORT}"
_DEVICE = re.compile(r"host|(?:GPU|MIG)-[0-9A-Za-z][0-9A-Za-z/_-]{0,127}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,255}")


def _read_argument(value: Any) -> str:
    """Any text that can be handed to a program: line breaks are fine, and so is nothing at all."""
    if type(value) in (int, float, bool):
        raise Wrong(f"wanted text, not {shown(value)}: quote it")
    if not isinstance(value, str):
        raise Wrong
    if "\0" in value or any("\ud800" <= c <= "\udfff" for c in value):
        raise Wrong("a NUL, or bytes that are not UTF-8, cannot be handed to a program")
    return value


def _read_argv(value: Any) -> tuple[str, ...]:
    argv = _ARGUMENTS.read(value)
    if not argv[0].strip():
        raise Wrong("item 1: wanted the program, not an empty text")
    return argv


def _read_absolute_argv(value: Any) -> tuple[str, ...]:
    argv = _read_argv(value)
    if not argv[0].startswith("/"):
        raise Wrong(f"item 1: wanted the program's absolute path, not {shown(argv[0])}")
    return argv


def _read_environment(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise Wrong
    for name, text in value.items():
        if not _VARIABLE.fullmatch(name):
            raise Wrong(f"{shown(name)} cannot be an environment variable's name")
        try:
            _read_argument(text)
        except Wrong as error:
            raise Wrong(f"{clip(name)}: {ARGUMENT.explain(text, error)}") from None
    return dict(value)


def _read_device(value: Any) -> str:
    if not isinstance(value, str) or not _DEVICE.fullmatch(value):
        raise Wrong
    return value


def _read_adapter(value: Any) -> LoraAdapter:
    given = value if isinstance(value, dict) else {"path": value}
    if strange := sorted(given.keys() - {"path", "scale"}):
        raise Wrong(f"unknown setting {clip(strange[0])!r}: an adapter has path and scale")
    path, scale = given.get("path"), given.get("scale", 1.0)
    try:
        path = PATH.read(path)
    except Wrong as error:
        raise Wrong(PATH.explain(path, error)) from None
    if type(scale) not in (int, float) or not math.isfinite(scale) or abs(scale) > 1000:
        raise Wrong(f"wanted a scale from -1000 to 1000, not {shown(scale)}")
    return LoraAdapter(path, float(scale))


ARGUMENT = Kind("text", _read_argument, schema={"type": "string"})
_ARGUMENTS = list_of(ARGUMENT, "a list of texts, the program and its arguments", least=1, most=1024)
ARGV = _ARGUMENTS._replace(read=_read_argv)
ABSOLUTE_ARGV = ARGV._replace(
    read=_read_absolute_argv, schema={**ARGV.schema, "prefixItems": [{"type": "string", "pattern": "^/"}]}
)
ENVIRONMENT = Kind(
    "a mapping of texts",
    _read_environment,
    scalar=False,
    schema={
        "type": "object",
        "propertyNames": {"pattern": f"^{_VARIABLE.pattern}$"},
        "additionalProperties": dict(ARGUMENT.schema),
    },
)
DEVICE = Kind(
    "host, or the UUID of a GPU or MIG instance (GPU-…, MIG-…: nvidia-smi -L)",
    _read_device,
    schema={"type": "string", "pattern": f"^(?:{_DEVICE.pattern})$"},
)
DEVICES = list_of(DEVICE, "a list of devices", least=1, distinct=True)
MODEL_NAMES = list_of(NAME, "a list of models' names", distinct=True)
_ADAPTER: dict[str, Any] = {
    "type": ["string", "object"],
    "minLength": 1,
    "properties": {"path": dict(PATH.schema), "scale": {"type": "number", "minimum": -1000, "maximum": 1000}},
    "required": ["path"],
    "additionalProperties": False,
}
ADAPTERS = list_of(
    Kind("a path, or {path, scale}", _read_adapter, schema=_ADAPTER), "a list of paths, or of {path, scale}", most=64
)
