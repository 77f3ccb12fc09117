"""Reads one YAML file strictly: plain values, the line that each stands on, and every slip in it.

It builds from PyYAML's events rather than its nodes, since anchors, aliases, tags and duplicate keys can be seen only
there, and resolves scalars by our own rule, so that ``no``, ``010`` and ``1:30`` never turn into something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from slimproc.config.problems import Given, Problem, at, key_path, shown
from slimproc.config.values import plain
from slimproc.errors import ConfigError

KeyPath = tuple[str | int, ...]
_MAX_DEPTH = 16
_MAX_BYTES = 4 << 20
INVALID = object()
"""Stands for a value that already has a problem of its own."""


class Document:
    """A file's settings. ``problems`` holds the slips that left the rest readable."""

    def __init__(self, source: str, base: Path) -> None:
        self.source = source
        self.base = base
        self.data: dict[str, Any] = {}
        self.problems: list[Problem] = []
        self._lines: dict[KeyPath, int] = {}

    def given(self, path: KeyPath, value: Any) -> Given:
        inside = None
        if isinstance(value, dict):
            inside = self.children(path, value)
            value = {key: given.value for key, given in inside.items()}
        return Given(value, self.source, key_path(path), self._lines.get(path, 1), self.base, inside)

    def children(self, path: KeyPath, mapping: dict[str, Any]) -> dict[str, Given]:
        """The readable entries of the mapping at ``path``."""
        return {k: self.given((*path, k), v) for k, v in mapping.items() if _readable(v)}

    def mark(self, path: KeyPath, line: int) -> None:
        self._lines.setdefault(path, line)

    def slip(self, path: KeyPath, line: int, message: str) -> None:
        self.problems.append(at(Given(None, self.source, key_path(path), line), message))


def read(file: Path) -> Document:
    """Raises ConfigError where nothing of the file can be read: no such file, not UTF-8, not YAML."""
    source = str(file)
    text = text_of(file)
    document = Document(source, file.absolute().parent)
    try:
        loader: Any = yaml.SafeLoader(text)
        _Builder(_events(loader), document).build()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        context = f" {error.context}" if error.context else ""
        raise ConfigError(f"{source}:{line}: not valid YAML:{context} {error.problem}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{source}:{line}: not valid YAML: a control character is not allowed here") from None
    except (ValueError, OverflowError):  # PyYAML lets them out, of an escape beyond Unicode and of a version
        message = "not valid YAML: a number is too large, as that of the character \\U…"
        raise ConfigError(f"{source}:{loader.line + 1}: {message}") from None
    return document


def _events(loader: Any) -> Iterator[Any]:
    """As ``yaml.parse`` makes them, which keeps to itself where it is."""
    while loader.check_event():
        yield loader.get_event()


def text_of(file: Path) -> str:
    """A file's text. Raises ConfigError where there is none, or far too much of it."""
    try:
        with file.open("rb") as stream:
            raw = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file}: cannot read the configuration: {error.strerror}") from None
    if len(raw) > _MAX_BYTES:
        raise ConfigError(f"{file}: larger than 4MiB: this is no configuration")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{file}:{line}: not UTF-8") from None


class _Builder:
    """Events are Any here: PyYAML's stubs give them no attributes."""

    def __init__(self, events: Iterator[Any], document: Document) -> None:
        self.events = events
        self.document = document

    def build(self) -> None:
        next(self.events)  # the stream's start
        if isinstance(next(self.events), yaml.StreamEndEvent):
            return
        event = next(self.events)
        data = self.value(event, ())
        if isinstance(data, dict):
            self.document.data = data
        elif data is not None and data is not INVALID:
            self.document.slip((), _line(event), f"wanted a mapping of settings, not {shown(data)}")
        next(self.events)  # the document's end
        after = next(self.events)
        if not isinstance(after, yaml.StreamEndEvent):
            self.document.slip((), _line(after), "a second YAML document in one file")

    def value(self, event: Any, path: KeyPath) -> Any:
        """The value that begins with ``event``, all of its events taken."""
        line = _line(event)
        if len(path) > _MAX_DEPTH:
            raise ConfigError(f"{self.document.source}:{line}: nested too deeply")
        if isinstance(event, yaml.AliasEvent):
            self.document.slip(path, line, f"aliases (*{event.anchor}) are not allowed")
            return INVALID
        built: Any
        if isinstance(event, yaml.MappingStartEvent):
            built = self.mapping(path)
        elif isinstance(event, yaml.SequenceStartEvent):
            built = self.sequence(path)
        else:
            built = plain(event.value) if event.style is None else event.value
        if event.anchor is not None:
            self.document.slip(path, line, f"anchors (&{event.anchor}) are not allowed")
            return INVALID
        if event.tag is not None:
            self.document.slip(path, line, f"tags ({event.tag}) are not allowed; quote what is text")
            return INVALID
        return built

    def sequence(self, path: KeyPath) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            item_path = (*path, len(items))
            self.document.mark(item_path, _line(event))
            items.append(self.value(event, item_path))
        return items

    def mapping(self, path: KeyPath) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            line = _line(event)
            key = self.key(event, path)
            if key is None:
                self.value(next(self.events), (*path, "?"))
                continue
            entry = (*path, key)
            if key in entries:
                first = self.document.given(entry, None).line
                self.document.slip(entry, line, f"duplicate key (first on line {first})")
                self.value(next(self.events), entry)
                continue
            self.document.mark(entry, line)
            entries[key] = INVALID  # marked before its value is read, so that a slip inside finds its line
            entries[key] = self.value(next(self.events), entry)
        return entries

    def key(self, event: Any, path: KeyPath) -> str | None:
        """A mapping's key, or None for one that was reported."""
        line = _line(event)
        if not isinstance(event, yaml.ScalarEvent):
            if not isinstance(event, yaml.AliasEvent):
                self.value(event, (*path, "?"))
            self.document.slip(path, line, "a key must be text")
            return None
        key = plain(event.value) if event.style is None else event.value
        if event.style is None and key == "<<":
            self.document.slip((*path, "<<"), line, "merge keys are not allowed")
            return None
        if not isinstance(key, str):
            self.document.slip(path, line, f"the key {event.value or '(empty)'} is not text: quote it")
            return None
        if event.anchor is not None or event.tag is not None:
            self.document.slip((*path, key), line, "anchors and tags are not allowed")
            return None
        return key


def _readable(value: Any) -> bool:
    """Whether it can be judged: a mapping's entries can each for itself, a list only as a whole."""
    if isinstance(value, list):
        return all(_readable(item) and (not isinstance(item, dict) or _readable([*item.values()])) for item in value)
    return value is not INVALID


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1
