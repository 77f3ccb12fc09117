"""Whether anything is left over: processes, descriptors, threads, memory and promises."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from slimproc.chaos.verdict import Line, Sight, Violation

_MIB: Final = 1 << 20
GROWTH: Final = 48 * _MIB
"""Bytes that the server may grow from the first quarter of a run to its last: its allocator keeps some of every peak."""
_LIVE: Final = frozenset({"starting", "ready", "draining", "stopping", "killing"})


def unsettled(now: Sight) -> list[str]:
    """What a server that nobody asks for anything still has to do."""
    found = [f"{name} is {now.sum(name):.0f}" for name in ("queue_depth", "inflight_requests") if now.sum(name)]
    return found + [f"a replica of {model} is {state}" for model, state in now.states if state in _LIVE - {"ready"}]


def claims(now: Sight, claim: Mapping[str, int]) -> list[Violation]:
    """``claim``: bytes of one replica of each model, where they are known. Of a server that has settled."""
    live: dict[str, int] = dict.fromkeys(claim, 0)
    for model, state in now.states:
        if model in live and state in _LIVE:
            live[model] += claim[model]
    found = [
        Violation("held bytes are live replicas' claims", f"{model}: {now.reserved.get(model, 0)} held, {bytes_} live")
        for model, bytes_ in live.items()
        if now.reserved.get(model, 0) != bytes_
    ]
    held = now.sum("memory_bytes", kind="held")
    if held != sum(now.reserved.values()):
        what = f"{held:.0f} in the metric, {sum(now.reserved.values())} for all models"
        found.append(Violation("held bytes are live replicas' claims", what))
    return found


def promised(now: Sight, claim: Mapping[str, int]) -> list[Violation]:
    """As ``claims``, of a server at any moment: whoever lives has its bytes, and no model has more than its replicas could need."""
    found: list[Violation] = []
    for model, bytes_ in claim.items():
        states = [state for name, state in now.states if name == model]
        live, has = sum(state in _LIVE for state in states), now.reserved.get(model, 0)
        if has % bytes_ or not live * bytes_ <= has <= len(states) * bytes_:
            what = f"{model}: {has} held for {live} live of {len(states)} replicas of {bytes_}"
            found.append(Violation("held bytes are live replicas' claims", what))
    return found


def overcommitted(now: Sight) -> list[Violation]:
    """Of a server at any moment: no device has promised more than it has."""
    found: list[Violation] = []
    for (name, labels), total in now.metrics.items():
        if name != "memory_bytes" or ("kind", "total") not in labels:
            continue
        device = dict(labels)["device"]
        held = now.sum("memory_bytes", device=device, kind="held")
        if held > total:
            found.append(Violation("no device promises more than it has", f"{device}: {held:.0f} held of {total:.0f}"))
    return found


def left_over(before: Sight, after: Sight) -> list[Violation]:
    """Both of a server with no model in memory and nothing to do."""
    found = [Violation("the server comes to rest", what) for what in unsettled(after)]
    for name in ("descriptors", "threads"):
        was, has = getattr(before, name), getattr(after, name)
        if has > was:
            found.append(Violation("nothing is left over", f"{has} {name}, and {was} before"))
    engines = [pid for pid, kind in after.children.items() if kind == "engine"]
    if engines:
        found.append(Violation("nothing is left over", f"engines {engines} with no model in memory"))
    if len(after.children) > len(before.children):
        what = f"children {sorted(after.children.values())}, and {sorted(before.children.values())} before"
        found.append(Violation("nothing is left over", what))
    if after.sum("memory_bytes", kind="held"):
        what = f"{after.sum('memory_bytes', kind='held'):.0f} bytes are held for no model"
        found.append(Violation("held bytes are live replicas' claims", what))
    return found


def growth(resident: Sequence[tuple[float, int]]) -> list[Violation]:
    """``resident``: (seconds, bytes), in order. Compares the last quarter's middle with the second's: the first warms up."""
    quarter = len(resident) // 4
    if quarter < 3:
        return []
    early = sorted(size for _, size in resident[quarter : 2 * quarter])[quarter // 2]
    late = sorted(size for _, size in resident[-quarter:])[quarter // 2]
    if late - early <= GROWTH:
        return []
    return [Violation("memory is bounded", f"{early // _MIB} MiB grew to {late // _MIB} MiB")]


def complaints(lines: Iterable[Line], junk: Sequence[str]) -> list[Violation]:
    """``junk``: what stands in the log and is no line of ours."""
    found = [
        Violation(
            "no traceback", f"{line.get('message')}: {str(line['exception'])[-300:]}", str(line.get("request_id", ""))
        )
        for line in lines
        if line.get("exception")
    ]
    found += [
        Violation("no traceback", str(line.get("message")) + ": " + str(line.get("error", "")))
        for line in lines
        if "a bug" in str(line.get("message"))
    ]
    if any("Traceback" in line for line in junk):
        found.append(Violation("no traceback", "\n".join(junk[-20:])[-1000:]))
    return found
