"""The kinds of values that a setting can have: what each wants, and how it is read without coercion.

A value is what ``plain`` or the YAML reader made: text, int, float, bool, None, a list or a mapping.
"""

from __future__ import annotations

import ipaddress
import math
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar, get_args, get_type_hints

import msgspec

from slimproc.config.problems import shown

T = TypeVar("T")

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
YEAR = 31_536_000
"""The longest time-out, in seconds: far above any use, far below what an event loop's timer overflows at."""

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,18})")
_FLOAT = re.compile(r"-?(?:0|[1-9][0-9]{0,18})(?:\.[0-9]{1,30}(?:[eE][-+]?[0-9]{1,3})?|[eE][-+]?[0-9]{1,3})")
_WORDS = {"true": True, "false": False, "null": None, "~": None, "": None}
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40}
_SIZE = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,12}))? ?(" + "|".join(_UNITS) + ")")
_TIME_WITH_UNIT = re.compile(r"[0-9.]+ ?(?:ms|s|sec|m|min|h|d)")
_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?")
_UNPRINTABLE = {"Cc", "Cs", "Zl", "Zp"}
"""Unicode categories that would break a log line, a metrics label or its UTF-8: controls, surrogates, separators."""


class Wrong(ValueError):
    """The value is not of its kind. With a message of its own where ``wanted X, not Y`` would not help enough."""


class Kind(NamedTuple, Generic[T]):
    """``read`` returns the parsed value or raises Wrong. ``text``: an environment variable is taken as it stands.

    ``scalar`` False: a list, which no environment variable can hold. ``schema``: the same as JSON Schema, for editors; it
    takes all that ``read`` does, and more where its language has no word for the rule.
    """

    wanted: str
    read: Callable[[Any], T]
    text: bool = False
    scalar: bool = True
    schema: Mapping[str, Any] = {}

    def explain(self, value: object, error: Wrong) -> str:
        return str(error) or f"wanted {self.wanted}, not {shown(value)}"


class Listen(msgspec.Struct, frozen=True):
    """Where to listen. ``host`` None: all interfaces; ``port`` 0: any free one."""

    host: str | None = "127.0.0.1"
    port: int = 8000

    def __str__(self) -> str:
        host = self.host or ""
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


def kinds_of(struct: type[msgspec.Struct]) -> dict[str, Kind[Any]]:
    """The kind of each field of ``struct`` that is annotated with one, by the field's name."""
    return {
        field: extra
        for field, hint in get_type_hints(struct, include_extras=True).items()
        for extra in get_args(hint)[1:]
        if isinstance(extra, Kind)
    }


def plain(text: str) -> str | int | float | bool | None:
    """An unquoted scalar: true, false, null, decimal numbers; anything else (``no``, ``010``, ``1:30``) stays text."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def integer(low: int, high: int) -> Kind[int]:
    def read(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise Wrong
        return value

    schema = {"type": "integer", "minimum": low, "maximum": high}
    return Kind(f"an integer from {low} to {high}", read, schema=schema)


def seconds(*, zero: bool = False) -> Kind[float]:
    """A time above 0, or from 0 with ``zero``."""

    def read(value: Any) -> float:
        if isinstance(value, str) and _TIME_WITH_UNIT.fullmatch(value):
            raise Wrong(f"times are plain numbers of seconds (30, 0.5), not {shown(value)}")
        if type(value) not in (int, float) or not math.isfinite(value) or not 0 <= value <= YEAR:
            raise Wrong
        if value == 0 and not zero:
            raise Wrong
        return float(value)

    schema = {"type": "number", "minimum" if zero else "exclusiveMinimum": 0, "maximum": YEAR}
    return Kind(f"a number of seconds {'from' if zero else 'above'} 0, at most {YEAR}", read, schema=schema)


def size(low: int, high: int, *, power_of_two: bool = False) -> Kind[int]:
    """Bytes: a number, or text with a unit."""

    def read(value: Any) -> int:
        count: Any = _with_unit(value) if isinstance(value, str) else value
        if type(count) is not int or not low <= count <= high or (power_of_two and count & (count - 1)):
            raise Wrong
        return int(count)

    rule = "a power of two " if power_of_two else ""
    wanted = f'a size in bytes (1048576, "1MiB", "500MB"), {rule}from {spell(low)} to {spell(high)}'
    schema = {"type": ["integer", "string"], "minimum": low, "maximum": high, "pattern": f"^{_SIZE.pattern}$"}
    return Kind(wanted, read, schema=schema)


def _with_unit(text: str) -> int:
    found = _SIZE.fullmatch(text)
    if not found:
        raise Wrong
    whole, fraction, unit = found.groups()
    places = len(fraction or "")
    scaled, rest = divmod(int(whole + (fraction or "")) * _UNITS[unit], 10**places)
    if rest:
        raise Wrong(f"{shown(text)} is not a whole number of bytes")
    return int(scaled)


def spell(count: int) -> str:
    """Bytes with the largest binary unit that divides them."""
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count and count % scale == 0:
            return f"{count // scale}{unit}"
    return str(count)


def choice(*words: str) -> Kind[str]:
    def read(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise Wrong
        return value

    return Kind(f"one of {', '.join(words)}", read, text=True, schema={"enum": list(words)})


def list_of(
    kind: Kind[T], wanted: str, *, least: int = 0, most: int = 4096, distinct: bool = False
) -> Kind[tuple[T, ...]]:
    """A list whose items are of one kind. ``distinct``: none is there twice, as it is parsed."""

    def read(value: Any) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise Wrong
        if not least <= len(value) <= most:
            raise Wrong(f"wanted {wanted}, from {least} to {most} items, not {len(value)}")
        items: list[T] = []
        for index, item in enumerate(value):
            try:
                parsed = kind.read(item)
            except Wrong as error:
                raise Wrong(f"item {index + 1}: {kind.explain(item, error)}") from None
            if distinct and parsed in items:
                raise Wrong(f"item {index + 1}: {shown(item)} is in the list before")
            items.append(parsed)
        return tuple(items)

    schema = {"type": "array", "items": dict(kind.schema), "minItems": least, "maxItems": most, "uniqueItems": distinct}
    return Kind(wanted, read, scalar=False, schema=schema)


def _read_boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Wrong
    return value


def _read_text(value: Any) -> str:
    if type(value) in (int, float, bool):
        raise Wrong(f"wanted text, not {shown(value)}: quote it")
    if not isinstance(value, str) or not value:
        raise Wrong
    if any(unicodedata.category(c) in _UNPRINTABLE for c in value):
        raise Wrong(f"{shown(value)} has control characters, or bytes that are not UTF-8, in it")
    return value


def _read_name(value: Any) -> str:
    text = _read_text(value)
    if len(text) > 256:
        raise Wrong(f"a model's name has at most 256 characters; {shown(text)} has {len(text)}")
    return text


def _read_socket_path(value: Any) -> str:
    text = _read_text(value)
    if len(text.encode()) > 100:
        raise Wrong(f"a unix socket's path has at most 100 bytes; this one has {len(text.encode())}")
    return text


def read_host(value: Any) -> str | None:
    """A host alone, IPv6 without brackets; ``""`` and ``*`` are all interfaces. Raises Wrong."""
    if not isinstance(value, str):
        raise Wrong
    if value in ("", "*"):
        return None
    if ":" not in value and _HOST_NAME.fullmatch(value) and not re.fullmatch(r"[0-9.]+", value):
        return value
    try:
        ipaddress.ip_address(value)
    except ValueError:
        raise Wrong from None
    return value


def _read_listen(value: Any) -> Listen:
    if type(value) is int:
        raise Wrong(f'wanted HOST:PORT, not {value}; for all interfaces write ":{value}"')
    if not isinstance(value, str):
        raise Wrong
    host, colon, port_text = value.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if ":" not in host:
            raise Wrong
    elif ":" in host:
        raise Wrong(f"wanted HOST:PORT, not {shown(value)}; an IPv6 address needs brackets: [::1]:8000")
    port = plain(port_text)
    if not colon or type(port) is not int or not 0 <= port <= 65535:
        raise Wrong
    return Listen(read_host(host), port)


_TEXT = {"type": "string", "minLength": 1}
BOOLEAN = Kind("true or false", _read_boolean, schema={"type": "boolean"})
TEXT = Kind("text", _read_text, text=True, schema=_TEXT)
NAME = Kind("text of 1 to 256 characters", _read_name, text=True, schema=_TEXT | {"maxLength": 256})
NAMES = list_of(NAME, "a list of texts")
PATH = Kind("a path", _read_text, text=True, schema=_TEXT)
SOCKET_PATH = Kind("a path", _read_socket_path, text=True, schema=_TEXT | {"maxLength": 100})
HOST = Kind("a host name or an IP address", read_host, text=True)
PORT = integer(0, 65535)
LISTEN = Kind(
    'HOST:PORT (127.0.0.1:8000, ":8000" for all interfaces, "[::1]:8000")',
    _read_listen,
    text=True,
    schema={"type": "string", "pattern": ":[0-9]{1,5}$"},
)
