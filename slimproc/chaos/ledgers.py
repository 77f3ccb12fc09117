"""Whether both sides' records agree: what clients were told, what the server logged, and what it counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from slimproc.chaos.verdict import Line, Sight, Told, Violation

_ENDED: Final = ("generation finished", "request forwarded", "request not forwarded")
REFUSALS: Final = frozenset({"unavailable", "invalid"})
"""Outcomes in the log that are counted as rejected."""
_CRASHED: Final = frozenset({"engine_crashed", "engine_error"})
_OUTCOMES: Final[Mapping[str, frozenset[str]]] = {
    "timeout": frozenset({"timeout"}),
    "QUEUE_TIMEOUT": frozenset({"timeout"}),
    "DRAIN_TIMEOUT": frozenset({"timeout"}),
    "shutting_down": frozenset({"shutdown"}),
    "SHUTDOWN": frozenset({"shutdown"}),
    "engine_crashed": frozenset({"engine_crashed"}),
    "engine_error": frozenset({"engine_error"}),
    "bad_gateway": frozenset({"engine_error"}),
    "BACKEND": _CRASHED | {"timeout"},
    "service_unavailable": frozenset({"unavailable"}),
    "insufficient_memory": frozenset({"unavailable"}),
    "RESOURCES": frozenset({"unavailable"}),
    "LOAD_FAILED": frozenset({"unavailable"}),
    "UNLOAD_FAILED": frozenset({"unavailable"}),
    "NOT_READY": frozenset({"unavailable"}),
    "LIFECYCLE_PENDING": frozenset({"unavailable"}),
}
"""What the log may say of a request that was told of an error; of any other error: nothing, or that it was refused."""


def compare(told: Iterable[Told], lines: Iterable[Line]) -> list[Violation]:
    """Every request has exactly one line with an outcome that fits, unless it was refused or left before it had any."""
    by_id: dict[str, list[Line]] = defaultdict(list)
    known: set[str] = set()
    for line in lines:
        if line.get("message") in _ENDED:
            by_id[str(line.get("request_id"))].append(line)
    found: list[Violation] = []
    for one in told:
        if one.request in known:
            found.append(Violation("one end", "the client has two records of it", one.request))
        known.add(one.request)
        found += _compare(one, by_id.get(one.request, []))
    found += [
        Violation("both sides agree", "the server finished a request that nobody sent", name)
        for name in by_id.keys() - known
    ]
    return found


def _compare(told: Told, lines: Sequence[Line]) -> list[Violation]:
    outcomes = [str(line.get("outcome")) for line in lines]
    if len(lines) > 1:
        return [Violation("one end", f"the server ended it {len(lines)} times: {outcomes}", told.request)]
    if told.end in ("left", "broken"):
        return []  # whether it had arrived, and how far it came, nobody can say
    may = frozenset({"ok"}) if told.end == "ok" else _OUTCOMES.get(told.code, frozenset({"invalid"}))
    if not lines:
        refused = told.end == "error" and (may <= REFUSALS or told.code in ("shutting_down", "SHUTDOWN"))
        if refused:
            return []
        return [Violation("both sides agree", f"told {told.end} {told.code}; the server logged nothing", told.request)]
    if outcomes[0] not in may:
        what = f"told {told.end} {told.code}; the server logged {outcomes[0]}"
        return [Violation("both sides agree", what, told.request)]
    return []


def count(told: Sequence[Told], lines: Iterable[Line], now: Sight) -> list[Violation]:
    """The server's counters: as many as were sent, and of each outcome as many as were logged."""
    found: list[Violation] = []
    counted = now.sum("requests_total") + now.sum("rejected_total")
    certain = sum(one.end in ("ok", "error") for one in told)
    if not certain <= counted <= len(told):
        what = f"{counted:.0f} requests are counted; {len(told)} were sent, and {certain} answered"
        found.append(Violation("counters", what))
    logged = Counter(str(line.get("outcome")) for line in lines if line.get("message") in _ENDED)
    for outcome in sorted(logged.keys() - REFUSALS):
        number = now.sum("requests_total", outcome=outcome)
        if number != logged[outcome]:
            found.append(Violation("counters", f"{outcome}: {number:.0f} counted, {logged[outcome]} logged"))
    return found
