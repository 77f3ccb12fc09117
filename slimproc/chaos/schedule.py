"""What is asked and what is broken, in which order: everything that a seed decides, and nothing that a clock does."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Target:
    """A model that is asked. ``scripted``: the fake backend, which says what its prompt has it say."""

    name: str
    scripted: bool
    generates: bool = True


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request. Times in seconds."""

    id: str
    kind: str
    """One of KINDS."""
    model: str
    scripted: bool = False
    pause: float = 0.0
    """Before it is sent."""
    stream: bool = False
    n: int = 1
    tokens: int = 8
    repeat: int = 1
    """How often the script gives its tokens."""
    max_tokens: int = 8
    latency: float = 0.002
    words: int = 0
    """That stand before the script, to make a prompt long."""
    trouble: str = ""
    """``die_at``, ``hang_at`` or ``error_at``, at the token ``at``."""
    at: int = 1
    signal: int = 9
    leave: str = ""
    """``close`` or ``reset``, ``leave_after`` seconds after the request has been sent."""
    leave_after: float = 0.0
    slow: float = 0.0
    """Seconds in which nothing of the answer is read."""
    timeout: float | None = None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong, ``gap`` seconds after the one before."""

    number: int
    kind: str
    """One of FAULTS."""
    gap: float
    pick: float
    """From 0 to 1: which of the processes that there are then."""
    model: str
    lasts: float = 0.0
    """Of a stopped process, seconds."""
    asks: tuple[Ask, ...] = ()


KINDS: Final = ("completion", "chat", "embedding", "infer", "bad")
_WEIGHTS: Final = (40, 25, 12, 15, 8)
FAULTS: Final = (
    "kill", "stop", "segv", "kill_renderer", "kill_probe", "load", "unload", "burst", "die_at", "hang_at", "error_at",
    "reload", "deaf",
)  # fmt: skip
_FAULT_WEIGHTS: Final = (16, 12, 10, 6, 6, 8, 12, 12, 8, 4, 6, 6, 6)
_SIGNALS: Final = (4, 6, 9, 11)
_BURST: Final = 24
_MUCH: Final = 200
"""Times that the tokens are repeated to a slow reader: more than its own buffer holds."""
_TOO_MUCH: Final = 1000
"""The same to a deaf one: more than the server keeps for anybody."""
_DEAF_FOR: Final = 6.0
LONG: Final = 100
"""Words of a prompt that some contexts may have no room for."""


def asks_of(seed: int, client: int, targets: Sequence[Target]) -> Iterator[Ask]:
    """What one client asks, without end. The same seed, client and targets give the same requests."""
    chance = random.Random(f"{seed} client {client}")  # noqa: S311 - a schedule, no secret
    number = 0
    while True:
        yield draw(chance, f"c{client}-{number}", targets)
        number += 1


def faults_of(seed: int, targets: Sequence[Target], every: float) -> Iterator[Fault]:
    """What goes wrong, without end, ``every`` seconds on average."""
    chance = random.Random(f"{seed} faults")  # noqa: S311 - the same
    number = 0
    while True:
        kind = chance.choices(FAULTS, _FAULT_WEIGHTS)[0]
        target = chance.choice(targets)
        yield Fault(
            number=number,
            kind=kind,
            gap=chance.uniform(0.2, 1.8) * every,
            pick=chance.random(),
            model=target.name,
            lasts=chance.choice((0.2, 1.0, 6.0)),
            asks=_asks_for(chance, kind, number, target) if kind != "deaf" else _deaf(number, targets),
        )
        number += 1


def _asks_for(chance: random.Random, kind: str, number: int, target: Target) -> tuple[Ask, ...]:
    if kind == "burst":
        return tuple(draw(chance, f"f{number}-{place}", [target], burst=True) for place in range(_BURST))
    if kind not in ("die_at", "hang_at", "error_at") or not target.scripted:
        return ()
    at = chance.choice((1, 2, 20))
    ask = Ask(
        id=f"f{number}-0", kind="completion", model=target.name, scripted=True, stream=chance.random() < 0.5, tokens=40,
        max_tokens=60, trouble=kind, at=at, signal=chance.choice(_SIGNALS),
    )  # fmt: skip
    return (ask,)


def _deaf(number: int, targets: Sequence[Target]) -> tuple[Ask, ...]:
    """One of each model that can say so much: some may be refused."""
    names = [target.name for target in targets if target.scripted]
    return tuple(
        Ask(
            id=f"f{number}-{place}", kind="completion", model=name, scripted=True, stream=True, tokens=60,
            repeat=_TOO_MUCH, max_tokens=60 * _TOO_MUCH, latency=0.0, slow=_DEAF_FOR,
        )
        for place, name in enumerate(names)
    )  # fmt: skip


def draw(chance: random.Random, name: str, targets: Sequence[Target], *, burst: bool = False) -> Ask:
    """One request. Of a ``burst`` it comes at once and takes a while, and nobody leaves."""
    target = chance.choices(targets, [max(1, 5 - 2 * place) for place in range(len(targets))])[0]
    kind = chance.choices(KINDS, _WEIGHTS)[0]
    if not target.generates and kind != "bad":
        kind = "embedding"
    elif not target.scripted and kind == "embedding":
        kind = "completion"  # what generates makes no vectors, except the fake backend
    tokens = chance.choice((1, 3, 8, 20, 60))
    generates = kind in ("completion", "chat", "infer")
    stream = generates and chance.random() < 0.6
    n = chance.choice((2, 3)) if kind in ("completion", "chat") and chance.random() < 0.12 else 1
    leaving = not burst and chance.random() < 0.18
    slow = 0.0 if leaving or burst or chance.random() > 0.06 else chance.uniform(0.5, 3.0)
    repeat = _MUCH if slow and stream and target.scripted and n == 1 else 1
    return Ask(
        id=name,
        kind=kind,
        model=target.name,
        scripted=target.scripted and generates,
        pause=0.0 if burst else chance.expovariate(4.0),
        stream=stream,
        n=n,
        tokens=tokens,
        repeat=repeat,
        max_tokens=max(1, tokens * repeat + chance.choice((-2, 0, 5))),
        latency=0.02 if burst else 0.0 if repeat > 1 else chance.choice((0.0, 0.002, 0.01, 0.03)),
        words=chance.choice((500, 3000)) if chance.random() < 0.08 else chance.randrange(8),
        leave=chance.choice(("close", "reset")) if leaving else "",
        leave_after=chance.choice((0.0, 0.01, 0.05, 0.2, 1.0)) * chance.random() if leaving else 0.0,
        slow=slow,
        timeout=round(chance.uniform(0.02, 2.0), 3) if chance.random() < 0.1 else None,
    )
