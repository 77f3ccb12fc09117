"""Writes a configuration of ours: plain YAML that our own strict reader takes, with what is to be known on top."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml

from slimproc.config.values import plain

Settings = dict[str, Any]
"""Keys and values of our own file."""

_BARE = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
"""Texts that need no quotes, as far as they are not read as something else."""
_SHORT, _WIDTH = 100, 120


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - our reader takes no anchors
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: FBT001, FBT002, ARG002 - PyYAML's
        super().increase_indent(flow, False)  # a list stands under its key


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    bare = _BARE.fullmatch(text) is not None and plain(text) == text and len(text) < _SHORT
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if bare else '"')


_Dumper.add_representer(str, _text)


def written(settings: Settings, title: str, notes: Iterable[str]) -> str:
    """The file's text: comments, then the settings in the order that they have."""
    body = yaml.dump(
        settings, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_WIDTH, default_flow_style=None
    )
    comments = [title, *(f"- {note}" for note in notes)]
    return "".join(f"# {comment}\n" for comment in comments) + "\n" + body
