"""Turns raw values into parsed ones, layer over layer, collecting every problem on the way."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from slimproc.config.problems import Given, Problem, at, unknown
from slimproc.config.runtime import home
from slimproc.config.values import Kind, Wrong, plain

PACKAGE, HUB = "package:", "hf:"


def read_value(kind: Kind[Any], given: Given, problems: list[Problem], *, scalar_text: bool = False) -> Any:
    """The parsed value, or None with a problem. ``scalar_text``: the value is text that follows the file's rules."""
    value = given.value
    if scalar_text and isinstance(value, str) and not kind.text:
        value = plain(value)
    try:
        return kind.read(value)
    except Wrong as error:
        problems.append(at(given, kind.explain(value, error)))
        return None


def read_layers(
    kinds: Mapping[str, Kind[Any]], layers: Sequence[Mapping[str, Given]], problems: list[Problem], *, texts: int
) -> tuple[dict[str, Any], dict[str, Given]]:
    """Parsed values and where each came from. Later layers win, all are checked; those from index ``texts`` are text."""
    values: dict[str, Any] = {}
    places: dict[str, Given] = {}
    for index, layer in enumerate(layers):
        for key, given in layer.items():
            parsed = read_value(kinds[key], given, problems, scalar_text=index >= texts)
            if parsed is not None:
                values[key] = parsed
                places[key] = given
    return values, places


def known(
    given: Mapping[str, Given], names: Collection[str], problems: list[Problem], elsewhere: Mapping[str, str] = {}
) -> dict[str, Given]:
    """``given`` without the keys that are not in ``names``, each of which becomes a problem.

    ``elsewhere``: what to say about keys that are known, but not here.
    """
    for key, place in given.items():
        if key not in names:
            problems.append(at(place, elsewhere.get(key) or unknown(key, names)))
    return {key: place for key, place in given.items() if key in names}


def located(text: str, given: Given, environ: Mapping[str, str]) -> str:
    """An absolute path: ``~`` is expanded, and a relative one is taken from the file it stands in, or from here."""
    if text == "~" or text.startswith("~/"):
        return str(home(environ) / text[2:])
    return str((given.base / text).absolute())


def located_spec(text: str, given: Given, environ: Mapping[str, str]) -> str:
    """The same for a model's path, which may also name a package's or the hub cache's file."""
    return text if text.startswith((PACKAGE, HUB)) else located(text, given, environ)


def text_file(text: str, given: Given, environ: Mapping[str, str], problems: list[Problem]) -> Path:
    """An absolute path to a file of text; a problem where it is not to be read."""
    file = Path(located(text, given, environ))
    try:
        file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        problems.append(at(given, f"cannot read {file}: {reason}"))
    return file
