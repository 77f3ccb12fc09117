"""Asked: what the command line of ``slimproc measure`` says."""

from __future__ import annotations

import math
import mimetypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slimproc.cli.configuration import typed_path
from slimproc.cli.measuring.failures import BadAsk

_MOST_ROUNDS = 1000
_MOST_AT_ONCE = 4096
_MOST_HEADROOM = 1000.0
_BINARY = "application/octet-stream"


@dataclass(frozen=True)
class Asked:
    rounds: int = 3
    requests: int = 1
    """Times that all requests are sent in each round."""
    concurrency: int | None = None
    """Requests at once. None: as many as the model takes."""
    headroom: float = 5.0
    """Per cent on top of the peaks."""
    body: bytes | None = None
    content_type: str = "application/json"
    write: bool = False

    def roomy(self, size: int) -> int:
        """A peak with its headroom."""
        return math.ceil(size * (1 + self.headroom / 100))


def read(flags: Mapping[str, Any]) -> Asked:
    """Raises BadAsk. The body's file is read now, so that it is not in the way of what is measured."""
    body = flags.get("body")
    given = flags.get("content_type")
    if given is not None and body is None:
        raise BadAsk("--content-type is of a --body, and there is none")
    kind = given or (mimetypes.guess_type(body)[0] or _BINARY if body is not None else Asked.content_type)
    if not kind.isascii() or not kind.isprintable():
        raise BadAsk(f"--content-type: {kind[:60]!r} cannot be a header")
    return Asked(
        rounds=_count(flags, "rounds", Asked.rounds, _MOST_ROUNDS),
        requests=_count(flags, "requests", Asked.requests, _MOST_ROUNDS),
        concurrency=_count(flags, "concurrency", None, _MOST_AT_ONCE),
        headroom=_headroom(flags.get("headroom")),
        body=None if body is None else _file(body),
        content_type=kind,
        write=bool(flags.get("write")),
    )


def _count(flags: Mapping[str, Any], name: str, default: Any, most: int) -> Any:
    text = flags.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= most:
        raise BadAsk(f"--{name}: a whole number from 1 to {most}, not {text[:60]!r}")
    return int(text)


def _headroom(text: str | None) -> float:
    if text is None:
        return Asked.headroom
    try:
        share = float(text.removesuffix("%"))
    except ValueError:
        share = math.nan
    if not 0 <= share <= _MOST_HEADROOM:
        raise BadAsk(f"--headroom: per cent from 0 to {_MOST_HEADROOM:g}, not {text[:60]!r}")
    return share


def _file(name: str) -> bytes:
    try:
        return typed_path(name).read_bytes()
    except OSError as error:
        raise BadAsk(f"--body: {name}: {error.strerror}") from None
