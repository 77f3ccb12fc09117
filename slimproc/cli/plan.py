"""``slimproc plan MODEL``: whether a model fits, who would go for it, and the bytes behind that."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import msgspec

from slimproc.cli.admin_client import ask, find_socket, in_route
from slimproc.cli.output import print_table
from slimproc.errors import ServiceUnavailable, SlimprocError
from slimproc.residency.views import Explanation


def plan(model: str, flags: Mapping[str, object], *, as_json: bool) -> int:
    """Print the decision. Status 0: it is in memory or can be; 2: it cannot be had now; 1: no server can be asked."""
    try:
        path = find_socket(flags)
        status, body = ask(path, "GET", f"/admin/plan?model={in_route(model)}")
        explanation = _read(body, status)
    except SlimprocError as error:
        print(f"slimproc: {error}", file=sys.stderr)
        return 1
    if as_json:
        print(msgspec.json.format(body).decode())
    else:
        print(f"{explanation.model}: {explanation.verdict}. {explanation.reason}")
        rows = [
            ("device", explanation.device or "-"),
            ("needed", _mib(explanation.needed)),
            ("available", _mib(explanation.available)),
            ("total", _mib(explanation.total)),
            ("would go", ", ".join(explanation.victims) or "-"),
        ]
        print_table(("", ""), rows)
    return 2 if explanation.verdict == "refuse" else 0


def _read(body: bytes, status: int) -> Explanation:
    try:
        if status == 200:
            return msgspec.json.decode(body, type=Explanation)
        message = str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError, UnicodeDecodeError, RecursionError):
        message = f"what answers there is no slimproc server (status {status})"
    raise ServiceUnavailable(message)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
