"""Where a setting was given and how a wrong one is reported. Every message of this package is made here."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from slimproc.errors import ConfigError

_PLAIN_PART = re.compile(r"[\w/:@+<-]+")


class Given(NamedTuple):
    """One raw value and its place. ``line`` is None where the source has no lines (flags, environment)."""

    value: Any
    source: str
    key: str
    line: int | None = None
    base: Path = Path()
    """What a relative path in ``value`` is relative to."""
    inside: Mapping[str, Given] | None = None
    """Where ``value`` is a mapping: its readable entries, each with its own place."""

    @property
    def origin(self) -> str:
        return f"{self.source} {self.key}" if self.line is None else f"{self.source} line {self.line}"


class Problem(NamedTuple):
    """One line of a ConfigError."""

    source: str
    message: str
    key: str = ""
    line: int | None = None

    def __str__(self) -> str:
        if self.line is None:
            return f"{self.source}{self.key and ' ' + self.key}: {self.message}"
        return f"{self.source}:{self.line}: {self.key and self.key + ': '}{self.message}"


def at(given: Given, message: str) -> Problem:
    """A problem at the place where ``given`` stands."""
    return Problem(given.source, message, given.key, given.line)


def raise_all(problems: Iterable[Problem]) -> None:
    """Raises ConfigError naming every problem, each on a line of its own, by source and line; returns where there is none."""
    sources: dict[str, list[Problem]] = {}
    for problem in problems:
        sources.setdefault(problem.source, []).append(problem)
    if sources:
        lines = [str(p) for found in sources.values() for p in sorted(found, key=lambda p: p.line or 0)]
        raise ConfigError("\n".join(lines))


def key_path(parts: Iterable[str | int]) -> str:
    """``models.smollm2.aliases[0]``; a part that would read as two is quoted."""
    text = ""
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            shown = part if _PLAIN_PART.fullmatch(part) and len(part) <= 100 else json.dumps(clip(part))
            text += f".{shown}" if text else shown
    return text


def clip(text: str, limit: int = 100) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shown(value: object) -> str:
    """A wrong value as the message has it: YAML's words, control characters escaped, never long."""
    match value:
        case None:
            return "nothing (leave the key out for its default)"
        case bool():
            return "true" if value else "false"
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case str():
            return repr(clip(value, 60))
        case _:
            return clip(str(value), 60)


def unknown(key: str, known: Iterable[str], what: str = "setting", shown_as: str = "") -> str:
    """What to say about a key that is not in ``known``.

    ``shown_as``: the prefix of the environment variables, where the suggestion is to be one.
    """
    near = difflib.get_close_matches(key.lower().replace("-", "_"), known, n=1)
    if not near:
        return f"unknown {what}"
    return f"unknown {what}; did you mean {shown_as + near[0].upper() if shown_as else near[0]}?"
