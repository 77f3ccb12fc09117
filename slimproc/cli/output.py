"""How commands print: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

_PIPE_WIDTH = 250
"""Columns where nobody looks: wide enough that no cell is cut before ``grep`` sees it."""


def make_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
    """For a console whose markup is off: cells are plain text, and brackets in them are no markup.

    Columns without any name have no heading.
    """
    table = Table(
        *columns, title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(columns)
    )
    for row in rows:
        table.add_row(*row)
    return table


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """On stdout."""
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    console = Console(markup=False, emoji=False, highlight=False, width=width)
    console.print(make_table(columns, rows, title))


def print_json(value: Any) -> None:
    try:
        text = msgspec.json.format(msgspec.json.encode(value)).decode()
    except UnicodeEncodeError:  # a file's name that is no text
        text = json.dumps(value, indent=2)
    print(text)
