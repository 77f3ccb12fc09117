"""``slimproc ps``: the replicas of a running server, from ``GET /admin/replicas``."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import msgspec

from slimproc.cli.admin_client import find_socket, get
from slimproc.cli.output import print_table
from slimproc.errors import ServiceUnavailable, SlimprocError


class Replica(msgspec.Struct, kw_only=True):
    """One replica, as the server tells it, or what this command shows of it.

    ``since``: seconds in its state; ``tokens``: produced so far; ``progress``: of its load, from 0 to 1.
    """

    model: str
    replica: int
    state: str
    reason: str | None = None
    pid: int | None = None
    sequences: int = 0
    slots: int = 0
    tokens: int = 0
    restarts: int = 0
    since: float | None = None
    progress: float = 1.0
    details: dict[str, str | int | float | bool] = {}


class Answer(msgspec.Struct):
    replicas: list[Replica]


def ps(flags: Mapping[str, object], *, as_json: bool) -> int:
    """Print the table. Status 1, and one line on stderr, where no server can be asked."""
    try:
        path = find_socket(flags)
        body = get(path, "/admin/replicas")
        try:
            answer = msgspec.json.decode(body, type=Answer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise ServiceUnavailable(f"what answers at {path} is no slimproc server") from None
    except SlimprocError as error:
        print(f"slimproc: {error}", file=sys.stderr)
        return 1
    if as_json:
        print(msgspec.json.format(body).decode())  # whole, also what a newer server adds
    else:
        columns = ("model", "replica", "state", "for", "pid", "sequences", "tokens", "restarts", "confined", "reason")
        print_table(columns, map(_row, answer.replicas))
    return 0


def _row(replica: Replica) -> tuple[str, ...]:
    return (
        replica.model,
        str(replica.replica),
        f"{replica.state} {replica.progress:.0%}" if 0 < replica.progress < 1 else replica.state,
        "-" if replica.since is None else _age(replica.since),
        "-" if replica.pid is None else str(replica.pid),
        f"{replica.sequences}/{replica.slots}",
        str(replica.tokens),
        str(replica.restarts),
        str(replica.details.get("confinement", "-")),
        replica.reason or "",
    )


def _age(seconds: float) -> str:
    """``42s``, ``5m07s``, ``3h12m``, ``2d04h``."""
    whole = int(seconds)
    for unit, size, part, part_size in (("d", 86_400, "h", 3_600), ("h", 3_600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // part_size:02d}{part}"
    return f"{whole}s"
