"""Reads another program's YAML: anchors, aliases and merge keys as it allows them, every scalar as the text it is."""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.constructor import ConstructorError, SafeConstructor

from slimproc.errors import ConfigError

_MAX_LENGTH = 1 << 20
_MAX_VALUES = 100_000
_MAX_DEPTH = 32
_MAX_MERGED = 64
"""Mappings that one merge key may name; more of them, in turn merged, would grow without bound."""


def read_foreign(text: str) -> dict[str, Any]:
    """A mapping of texts, None, lists and mappings, which is a tree of bounded size. Raises ConfigError."""
    if len(text) > _MAX_LENGTH:
        raise ConfigError(f"longer than {_MAX_LENGTH} characters: this is no configuration")
    try:
        value = yaml.load(text, Loader=_Loader)  # noqa: S506 - it makes texts, lists and mappings only
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"not valid YAML: {error.problem}{f' on line {mark.line + 1}' if mark else ''}") from None
    except (ValueError, OverflowError):  # PyYAML lets them out, of an escape beyond Unicode and of a version
        raise ConfigError("not valid YAML: a number is too large") from None
    except yaml.YAMLError:
        raise ConfigError("not valid YAML: a control character is not allowed here") from None
    except RecursionError:
        raise ConfigError("nested too deeply") from None
    _bound(value)
    if not isinstance(value, dict):
        raise ConfigError("wanted a mapping of settings")
    return value


def _bound(root: Any) -> None:
    """An alias costs nothing until somebody walks through what it stands for: refuse what would be walked for ever."""
    rest: list[tuple[Any, int]] = [(root, 0)]
    seen = 0
    while rest:
        value, depth = rest.pop()
        seen += 1
        if depth > _MAX_DEPTH:
            raise ConfigError("nested too deeply")
        if seen > _MAX_VALUES:
            raise ConfigError(f"it has more than {_MAX_VALUES} values: this is no configuration")
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        rest.extend((item, depth + 1) for item in inside)


class _Loader(yaml.SafeLoader):
    """Knows no numbers, booleans, dates or other programs' types: ``1.10`` and ``no`` stay what was written."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - PyYAML's
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        if len(keys) != len(set(keys)):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ConstructorError(None, None, f"the key {twice[:60]!r} is there twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge" and len(value.value) > _MAX_MERGED:
                raise ConstructorError(None, None, "a merge key names too much", key.start_mark)
        super().flatten_mapping(node)
        if len(node.value) > _MAX_VALUES:
            raise ConstructorError(None, None, "merge keys make it too large", node.start_mark)


_Loader.yaml_implicit_resolvers = {}
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"<<$"), ["<"])
_Loader.yaml_constructors = {
    "tag:yaml.org,2002:null": SafeConstructor.construct_yaml_null,
    "tag:yaml.org,2002:str": SafeConstructor.construct_yaml_str,
    "tag:yaml.org,2002:seq": SafeConstructor.construct_yaml_seq,
    "tag:yaml.org,2002:map": SafeConstructor.construct_yaml_map,
    None: SafeConstructor.construct_undefined,
}
