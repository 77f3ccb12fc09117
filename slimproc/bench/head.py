"""HTTP/1.1 as far as a load generator needs it: the head of an answer, and a whole body out of its chunks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

NO_HTTP: Final = "what answers speaks no HTTP/1.1"
_STATUS: Final = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: .*)?")
_LENGTH: Final = re.compile(r"[0-9]{1,15}")
_SIZE: Final = re.compile(rb"([0-9a-fA-F]{1,12})(?:[ \t;][^\r\n]*)?")


class HeadError(ValueError):
    """The head of an answer is not HTTP/1.1."""


@dataclass(frozen=True)
class Head:
    status: int = 0
    chunked: bool = False
    length: int | None = None
    """Of the body; None: it ends with its last chunk or with the connection."""
    events: bool = False
    """It says of itself that it is a stream of events."""
    content_type: str = ""
    keep_alive: bool = False
    retry_after: str = ""


def parse_head(data: bytes) -> Head:
    """``data``: without the empty line at its end. Raises HeadError."""
    first, *lines = data.split(b"\r\n")
    found = _STATUS.fullmatch(first)
    if not found:
        raise HeadError(f"{NO_HTTP}: {first[:60]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon:
            raise HeadError(f"an answer has a header without a colon: {line[:60]!r}")
        headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()
    status = int(found[2])
    chunked = "chunked" in headers.get("transfer-encoding", "").lower()
    length: int | None = None
    if status in (204, 304):
        length = 0
    elif not chunked and "content-length" in headers:
        if not _LENGTH.fullmatch(headers["content-length"]):
            raise HeadError(f"an answer has a Content-Length of {headers['content-length'][:60]!r}")
        length = int(headers["content-length"])
    connection = headers.get("connection", "").lower()
    kept = "close" not in connection and (found[1] == b"1" or "keep-alive" in connection)
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    return Head(
        status=status,
        chunked=chunked,
        length=length,
        events=content_type == "text/event-stream",
        content_type=content_type,
        keep_alive=kept and (chunked or length is not None),
        retry_after=headers.get("retry-after", ""),
    )


def dechunk(data: bytes) -> bytes | None:
    """The body of ``data``; None when its last chunk has not come or a size is none."""
    parts: list[bytes] = []
    at = 0
    while True:
        line = data.find(b"\r\n", at)
        if line < 0:
            return None
        found = _SIZE.fullmatch(data, at, line)
        if not found:
            return None
        size = int(found[1], 16)
        at = line + 2
        if not size:
            return b"".join(parts) if data.find(b"\r\n", at) >= 0 else None
        parts.append(data[at : at + size])
        at += size + 2
