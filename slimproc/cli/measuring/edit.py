"""Edits the text of a configuration: puts a model's ``memory:`` in its place, and touches no other character."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import yaml

from slimproc.cli.measuring.profile import block, entries
from slimproc.config import MemoryProfile

DEFAULT_INDENT = 4


class CannotEdit(Exception):
    """The text is not of a kind that can be edited; ``str()`` says why."""


class _Change(NamedTuple):
    """``text`` in the place of what stands from ``start`` to ``end``."""

    start: int
    end: int
    text: str


def with_memory(text: str, model: str, memory: MemoryProfile) -> str:
    """The text with ``memory`` in it, of a file that loads. Raises CannotEdit.

    Where there is a block already its values are replaced one by one, so that its form and comments stay.
    """
    _, mapping = _model(text, model)
    there = _value(mapping, "memory")
    if isinstance(there, yaml.MappingNode):
        changes = list(_replaced(text, there, memory))
    elif mapping.flow_style:
        inside = ", ".join(f"{key}: {value}" for key, value in entries(memory).items())
        changes = [_more(mapping, f", memory: {{{inside}}}")]
    else:
        lines = block(memory, mapping.value[0][0].start_mark.column)
        changes = [_new_lines(text, mapping, lines)]
    for change in sorted(changes, reverse=True):
        text = text[: change.start] + change.text + text[change.end :]
    return text


def indent_of(text: str, model: str) -> int:
    """The column of the model's keys; the usual one where they do not stand on lines of their own."""
    try:
        _, mapping = _model(text, model)
    except CannotEdit:
        return DEFAULT_INDENT
    return DEFAULT_INDENT if mapping.flow_style else int(mapping.value[0][0].start_mark.column)


# --- finding ----------------------------------------------------------------------------------------------------------


def _model(text: str, name: str) -> tuple[yaml.Node, yaml.MappingNode]:
    """The key and the settings of a model."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise CannotEdit(f"it is not valid YAML any more ({type(error).__name__})") from None
    models = _value(root, "models")
    for key, value in models.value if isinstance(models, yaml.MappingNode) else ():
        if key.value == name and isinstance(value, yaml.MappingNode) and value.value:
            return key, value
    raise CannotEdit(f"it has no model {name!r} any more")


def _value(node: yaml.Node | None, name: str) -> yaml.Node | None:
    """The value of a mapping's key."""
    if not isinstance(node, yaml.MappingNode):
        return None
    return next((value for key, value in node.value if key.value == name), None)


def _end(node: yaml.Node) -> int:
    """Where it ends. What a block collection itself says of that is where the next thing begins."""
    if isinstance(node, yaml.ScalarNode):
        if node.style in ("|", ">"):
            raise CannotEdit("the last thing before the place is a text of several lines")
        return int(node.end_mark.index)
    assert isinstance(node, yaml.CollectionNode)
    if node.flow_style:
        return int(node.end_mark.index)
    last = node.value[-1]
    return _end(last[1] if isinstance(node, yaml.MappingNode) else last)


# --- changing ---------------------------------------------------------------------------------------------------------


def _replaced(text: str, there: yaml.MappingNode, memory: MemoryProfile) -> Iterator[_Change]:
    """Value for value; keys that are not there come after the last one."""
    wanted = entries(memory)
    for key, value in there.value:
        if key.value not in wanted:
            raise CannotEdit(f"its memory has a key {key.value!r} by now")
        yield _Change(value.start_mark.index, value.end_mark.index, wanted.pop(key.value))
    if not wanted:
        return
    if there.flow_style:
        yield _more(there, "".join(f", {key}: {value}" for key, value in wanted.items()))
        return
    column = there.value[0][0].start_mark.column
    yield _new_lines(text, there, [f"{' ' * column}{key}: {value}" for key, value in wanted.items()])


def _more(mapping: yaml.MappingNode, text: str) -> _Change:
    """After the last value of a mapping in braces."""
    end = _end(mapping.value[-1][1])
    return _Change(end, end, text)


def _new_lines(text: str, after: yaml.MappingNode, lines: list[str]) -> _Change:
    """Lines after the one on which the last thing of ``after`` ends, and its comment."""
    line_end = "\r\n" if "\r\n" in text else "\n"
    found = text.find("\n", _end(after))
    if found < 0:
        return _Change(len(text), len(text), "".join(line_end + line for line in lines) + line_end)
    return _Change(found + 1, found + 1, "".join(line + line_end for line in lines))
