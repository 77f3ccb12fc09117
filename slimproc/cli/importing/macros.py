"""llama-swap's macros: ``${name}`` in a text, also inside another macro, and ``${env.NAME}``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from slimproc.cli.importing.fields import Fields
from slimproc.config.problems import clip, shown
from slimproc.errors import ConfigError

_MACRO = re.compile(r"\$\{([A-Za-z0-9_.-]{1,128})\}")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LEFT = frozenset({"PORT", "PID"})
"""What is known only when the server runs."""
_MAX_LENGTH = 64 << 10
_MAX_DEPTH = 64


class Macros:
    """``environ``: what ``${env.NAME}`` stands for now; the names that were asked for are added to ``used``."""

    def __init__(self, values: Mapping[str, str], environ: Mapping[str, str], used: set[str]) -> None:
        self._values = dict(values)
        self._environ = environ
        self._used = used
        self._expanded: dict[str, str] = {}

    def with_own(self, own: Mapping[str, str]) -> Macros:
        """These, and others that win over them."""
        return Macros({**self._values, **own}, self._environ, self._used)

    def expand(self, text: str, where: str, *, strict: bool = True) -> str:
        """The text without macros but PORT and PID; not ``strict``: what is no macro's name stays, too.

        Raises ConfigError: there is none of that name, it is made of itself, the text becomes far too long.
        """
        if not strict:
            known = {f"${{{name}}}" for name in self._values}
            return _MACRO.sub(
                lambda found: (
                    self.expand(found[0], where) if found[0] in known or found[1].startswith("env.") else found[0]
                ),
                text,
            )
        return self._expand(text, where, ())

    def _expand(self, text: str, where: str, way: tuple[str, ...]) -> str:
        parts: list[str] = []
        length, end = len(text), 0
        for found in _MACRO.finditer(text):
            parts += (text[end : found.start()], self._value(found[1], where, way))
            length += len(parts[-1])
            end = found.end()
            if length > _MAX_LENGTH:
                break
        if length > _MAX_LENGTH:
            raise ConfigError(f"{where}: longer than {_MAX_LENGTH} characters")
        return "".join((*parts, text[end:]))

    def _value(self, name: str, where: str, way: tuple[str, ...]) -> str:
        if name in _LEFT:
            return f"${{{name}}}"
        if name.startswith("env."):
            variable = name.removeprefix("env.")
            if variable not in self._environ:
                raise ConfigError(f"{where}: the environment variable {variable} is not set")
            self._used.add(variable)
            return self._environ[variable]
        if name not in self._values:
            raise ConfigError(f"{where}: there is no macro {shown(name)}")
        if name in way:
            raise ConfigError(f"{where}: the macro {shown(name)} is made of itself")
        if len(way) > _MAX_DEPTH:
            raise ConfigError(f"{where}: macros inside macros go too deep")
        if name not in self._expanded:
            self._expanded[name] = self._expand(self._values[name], where, (*way, name))
        return self._expanded[name]


def read_macros(fields: Fields) -> dict[str, str]:
    """The ``macros`` of the file, or of one model. Raises ConfigError."""
    macros = fields.inside("macros")
    values: dict[str, str] = {}
    for name in sorted(macros.given) if macros is not None else ():
        assert macros is not None
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{fields.where or 'macros'}: a macro cannot be called {clip(name)!r}")
        values[name] = macros.text(name) or ""
    return values
