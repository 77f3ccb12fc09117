"""``slimproc load`` and ``slimproc unload``: an operator's word on which models are in memory, through the admin socket."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import msgspec

from slimproc.cli.admin_client import ask, find_socket, in_route
from slimproc.errors import ServiceUnavailable, SlimprocError

_LIMIT = 3600.0
"""Seconds. The server's own limits (``load_timeout``, ``drain_timeout``, ``unload_timeout``) end the wait before."""


class _Outcome(msgspec.Struct):
    status: str
    reason: str = ""


class _Error(msgspec.Struct):
    message: str


def lifecycle(verb: str, model: str, flags: Mapping[str, object], *, wait: bool) -> int:
    """Ask the server to ``load`` or ``unload``; with ``wait``, until it has. Status 1, and one line, if it has not."""
    try:
        path = find_socket(flags)
        route = f"/admin/models/{in_route(model)}/{verb}" + ("?wait=true" if wait else "")
        status, body = ask(path, "POST", route, _LIMIT if wait else 10.0)
        said = _said(body, status)
    except SlimprocError as error:
        print(f"slimproc: {error}", file=sys.stderr)
        return 1
    if status >= 400:
        print(f"slimproc: {said}", file=sys.stderr)
        return 1
    print(f"{model}: {said}")
    return 0


def _said(body: bytes, status: int) -> str:
    try:
        raw = msgspec.json.decode(body)
        if status >= 400:
            return msgspec.convert(raw["error"], _Error).message
        found = msgspec.convert(raw, _Outcome)
    except (msgspec.MsgspecError, KeyError, TypeError, UnicodeDecodeError, RecursionError):
        raise ServiceUnavailable(f"what answers there is no slimproc server (status {status})") from None
    return found.status + (f": {found.reason}" if found.reason else "")
