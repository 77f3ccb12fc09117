"""Settings from the environment and from a ``.env`` file: every scalar top-level key as ``SLIMPROC_KEY``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from slimproc.config.model import MODEL_BLOCKS, MODEL_KINDS
from slimproc.config.problems import Given, Problem, at, unknown
from slimproc.config.whole import KINDS

PREFIX = "SLIMPROC_"
VARIABLES = {PREFIX + key.upper(): key for key, kind in KINDS.items() if kind.scalar}
_NOT_SETTINGS = ("SLIMPROC_FAKE_", "SLIMPROC_TEST_", "SLIMPROC_BENCH_")
"""Read by stand-ins, tests and benchmarks, which run slimproc with them set."""
_KUBERNETES = re.compile(r"SLIMPROC_(?:SERVICE_.*|PORT|PORT_.*)")
"""What Kubernetes sets in every container beside a service called slimproc (``SLIMPROC_PORT=tcp://10.0.0.1:80``)."""
_ASSIGNMENT = re.compile(r"\s*(?:export\s+)?(SLIMPROC_\w+)\s*=\s*(.*?)\s*")
_QUOTED = re.compile(r"""("[^"\\]*"|'[^']*')\s*(?:#.*)?""")

Found = tuple[dict[str, Given], list[Problem]]


def from_environment(environ: Mapping[str, str]) -> Found:
    """The settings in ``environ``, by key."""
    variables = {
        name: Given(value, "environment", name)
        for name, value in sorted(environ.items())
        if name.startswith(PREFIX) and not _of_kubernetes(name, environ)
    }
    return _settings(variables)


def from_dotenv(file: Path) -> Found:
    """The settings in a ``.env`` file; other programs' variables in it are passed over. No settings where there is no file,
    or a directory: some call their virtual environment so.
    """
    try:
        lines = file.read_text("utf-8-sig").splitlines()
    except (FileNotFoundError, IsADirectoryError):
        return {}, []
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        return {}, [Problem(str(file), f"cannot read it: {reason}")]
    variables: dict[str, Given] = {}
    problems = []
    for number, line in enumerate(lines, 1):
        if not (found := _ASSIGNMENT.fullmatch(line)):
            continue
        name, text = found.groups()
        given = Given(_unquoted(text), str(file), name, number)
        if given.value is None:
            problems.append(at(given, "the quotes are not closed, or something follows them"))
        elif name in variables:
            problems.append(at(given, f"set twice (first on line {variables[name].line})"))
        else:
            variables[name] = given
    settings, more = _settings(variables)
    return settings, problems + more


def _unquoted(text: str) -> str | None:
    """A value without its quotes, or without the comment that follows it. None: the quotes are wrong."""
    if text[:1] in ('"', "'"):
        found = _QUOTED.fullmatch(text)
        return found[1][1:-1] if found else None
    return re.split(r"(?:^|\s)#", text, maxsplit=1)[0].rstrip()


def _settings(variables: Mapping[str, Given]) -> Found:
    settings, problems = {}, []
    for name, given in variables.items():
        if name in VARIABLES:
            settings[VARIABLES[name]] = given
        elif not name.startswith(_NOT_SETTINGS):
            problems.append(at(given, _why_not(name)))
    return settings, problems


def _why_not(name: str) -> str:
    key = name.removeprefix(PREFIX).lower()
    if key in ("host", "port"):
        return "unknown variable; set SLIMPROC_LISTEN=HOST:PORT"
    if key in KINDS or key == "memory":
        return "unknown variable; this is no single value: set it in the file"
    if key in MODEL_KINDS or key in MODEL_BLOCKS:
        return "unknown variable; this is a setting of one model: set it in the file"
    return unknown(key, VARIABLES.values(), "variable", shown_as=PREFIX)


def _of_kubernetes(name: str, environ: Mapping[str, str]) -> bool:
    return "SLIMPROC_SERVICE_HOST" in environ and _KUBERNETES.fullmatch(name) is not None
