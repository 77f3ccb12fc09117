"""The entries of a foreign mapping, each taken once and checked; what nobody takes is told."""

from __future__ import annotations

import math
from typing import Any

from slimproc.config.problems import clip, key_path, shown
from slimproc.errors import ConfigError

_TRUE = frozenset({"true", "yes", "on"})
_FALSE = frozenset({"false", "no", "off"})


class Notes:
    """What the user has to know, a printable line each."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, where: str, message: str) -> None:
        line = f"{where}: {message}" if where else message
        self.lines.append("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in clip(line, 500)))


class Fields:
    """One mapping. A key that is not there, or has no value, is None. Raises ConfigError naming a key of a wrong type."""

    def __init__(self, where: str, mapping: Any, notes: Notes) -> None:
        if not isinstance(mapping, dict):
            raise ConfigError(f"{where or 'the file'}: wanted a mapping, not {_found(mapping)}")
        self.where = where
        self.notes = notes
        self._rest = dict(mapping)
        self.given = frozenset(key for key in mapping if isinstance(key, str))

    def path(self, key: str) -> str:
        return f"{self.where}.{key_path([key])}" if self.where else key_path([key])

    def text(self, key: str) -> str | None:
        value = self._rest.pop(key, None)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{self.path(key)}: wanted text, not {_found(value)}")
        return value

    def number(self, key: str) -> int | float | None:
        """As ours writes it: an integer where it is one."""
        text = self.text(key)
        if text is None:
            return None
        try:
            number = float(text) if len(text) <= 40 else math.nan
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or abs(number) > 1 << 53:
            raise ConfigError(f"{self.path(key)}: wanted a number, not {shown(text)}")
        return int(number) if number == int(number) else number

    def flag(self, key: str) -> bool | None:
        text = self.text(key)
        if text is None:
            return None
        if text.lower() not in _TRUE | _FALSE:
            raise ConfigError(f"{self.path(key)}: wanted true or false, not {shown(text)}")
        return text.lower() in _TRUE

    def texts(self, key: str) -> list[str] | None:
        value = self._rest.pop(key, None)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            found = "a list of other things" if isinstance(value, list) else _found(value)
            raise ConfigError(f"{self.path(key)}: wanted a list of texts, not {found}")
        return value

    def inside(self, key: str) -> Fields | None:
        value = self._rest.pop(key, None)
        return None if value is None else Fields(self.path(key), value, self.notes)

    def named(self, key: str, *, take: bool = True) -> list[tuple[str, Fields]]:
        """The mappings in the mapping ``key``, each with its name."""
        value = self._rest.pop(key, None) if take else self._rest.get(key)
        outer = Fields(self.path(key), {} if value is None else value, self.notes)
        found = []
        for name, inner in outer._rest.items():
            if not isinstance(name, str):
                raise ConfigError(f"{self.path(key)}: wanted texts as names, not {_found(name)}")
            found.append((name, Fields(outer.path(name), inner, self.notes)))
        return found

    def lost(self, key: str, why: str) -> None:
        """Say that a key, where it is given, is not carried over, and why."""
        if self._rest.pop(key, None) is not None:
            self.notes.add(self.path(key), f"not carried over: {why}")

    def finish(self, *ignored: str) -> None:
        """Say which keys are left, but for ``ignored``, which mean nothing here."""
        for key in self._rest:
            if key not in ignored:
                self.notes.add(self.path(str(key)), "not carried over")
        self._rest.clear()


def _found(value: Any) -> str:
    return "nothing" if value is None else shown(value)
