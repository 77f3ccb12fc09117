"""Benchmark: a plan against one server or two, round by round, with everything that was measured."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from slimproc.bench.asks import Asks
from slimproc.bench.drive import Drive
from slimproc.bench.failures import BadPlan
from slimproc.bench.plan import Plan
from slimproc.bench.pool import look
from slimproc.bench.sample import Sample, between_tokens
from slimproc.bench.summary import Summary, summarize
from slimproc.bench.target import Target
from slimproc.bench.versus import order

LOOK_LIMIT: Final = 10.0
"""Seconds that a server has to say which models it has."""
_MOST_NAMED: Final = 8


@dataclass(frozen=True)
class Side:
    """A server, and the model that is asked for; None: it is not named."""

    target: Target
    model: str | None


@dataclass(frozen=True)
class Turn:
    """One side in one round."""

    side: int
    number: int
    summary: Summary
    samples: list[Sample]


class Benchmark:
    """``turns`` grows while ``run`` does. ``watch`` is called with each drive as it begins."""

    def __init__(
        self, sides: Sequence[Side], plan: Plan, rounds: int, watch: Callable[[Drive, int, int], None] | None = None
    ) -> None:
        self.sides = tuple(sides)
        self.plan = plan
        self.rounds = rounds
        self.turns: list[Turn] = []
        self.gone = ""
        """Which server went away, and why; empty: none did."""
        self.stopped = False
        self._watch = watch
        self._drive: Drive | None = None

    async def run(self) -> None:
        for number in range(self.rounds):
            salt = secrets.token_hex(4)  # of the round: both servers are asked the same
            for side in order(number) if len(self.sides) == 2 else (0,):
                await self._turn(side, number, salt)
                if self.stopped or self.gone:
                    return

    async def _turn(self, side: int, number: int, salt: str) -> None:
        target, model = self.sides[side].target, self.sides[side].model
        drive = self._drive = Drive(target, self.plan, Asks(self.plan, model=model, salt=salt))
        if self._watch is not None:
            self._watch(drive, side, number)
        await drive.run()
        for sample in drive.samples:
            between_tokens(sample)
        summary = summarize(drive.samples, self.plan, wall=drive.wall, cpu=drive.cpu)
        self.turns.append(Turn(side, number, summary, drive.samples))
        if drive.gone:
            self.gone = f"{target.url} went away: {drive.gone}"

    def stop(self) -> None:
        """End now; ``turns`` has what was measured, once ``run`` has returned."""
        self.stopped = True
        if self._drive is not None:
            self._drive.stop()

    def whole(self, side: int) -> Summary | None:
        """All rounds of one side together; None before its first."""
        turns = [turn for turn in self.turns if turn.side == side]
        if not turns:
            return None
        samples = [sample for turn in turns for sample in turn.samples]
        wall, cpu = sum(turn.summary.wall for turn in turns), sum(turn.summary.client_cpu for turn in turns)
        return summarize(samples, self.plan, wall=wall, cpu=cpu)

    def pairs(self) -> list[tuple[Summary, Summary]]:
        """The rounds that both sides have finished."""
        by_round: dict[int, dict[int, Summary]] = {}
        for turn in self.turns:
            by_round.setdefault(turn.number, {})[turn.side] = turn.summary
        return [(both[0], both[1]) for both in by_round.values() if len(both) == 2]


async def choose_model(target: Target, wanted: str | None) -> str | None:
    """``wanted``, or the only model that the server lists, or None where it lists none. Raises Unreachable, and BadPlan
    where it lists several and none is wanted.
    """
    answer = await look(target, LOOK_LIMIT)
    if wanted is not None or answer.head.status != 200:
        return wanted
    names = _names(answer.body)
    if len(names) > 1:
        listed = ", ".join(names[:_MOST_NAMED]) + (", …" if len(names) > _MOST_NAMED else "")
        raise BadPlan(f"{target.url} has several models: say with --model which ({listed})")
    return names[0] if names else None


def _names(body: bytes) -> list[str]:
    try:
        listed: Any = msgspec.json.decode(body)["data"]
        return [str(one["id"]) for one in listed]
    except (msgspec.MsgspecError, KeyError, TypeError, RecursionError, UnicodeDecodeError):
        return []
