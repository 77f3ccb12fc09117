"""The raw data: one row for every request, as CSV and within the JSON of a whole benchmark."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from typing import Any, Final, TextIO

import msgspec

from slimproc.bench.sample import Sample

FIELDS: Final = tuple(field for field in Sample.__struct_fields__ if field != "gaps")


def row(sample: Sample, server: str, turn: int) -> dict[str, Any]:
    """``server``: its URL; ``turn``: the round. Times in seconds, to the microsecond."""
    values = {name: _rounded(getattr(sample, name)) for name in FIELDS}
    return {"server": server, "round": turn, **values}


def write_csv(file: TextIO, rows: Iterable[dict[str, Any]]) -> None:
    """Cells of a server's words are put in quotes where a spreadsheet would take them for a formula."""
    writer = csv.DictWriter(file, ("server", "round", *FIELDS), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in one.items()} for one in rows)


def write_json(file: TextIO, document: dict[str, Any]) -> None:
    file.write(msgspec.json.format(msgspec.json.encode(document)).decode() + "\n")


def _rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value
