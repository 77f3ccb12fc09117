"""Run: the load, the faults and the watch over one server, from its start to its end, and every violation found."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Final

from slimproc.bench.head import HeadError
from slimproc.chaos import ledgers, leftovers
from slimproc.chaos.breaking import Breaker
from slimproc.chaos.exchange import exchange
from slimproc.chaos.failures import ServerFailed
from slimproc.chaos.judge import judge
from slimproc.chaos.schedule import Ask, Target, asks_of, faults_of
from slimproc.chaos.serving import Serving
from slimproc.chaos.verdict import Sight, Told, Violation

_HEALTH_EVERY: Final = 0.5
_HEALTH_WITHIN: Final = 2.0
_SETTLE: Final = 60.0
"""Seconds in which a server that is left alone has to come to rest."""
_MOST_VIOLATIONS: Final = 1000
_UNREACHABLE: Final = (OSError, HeadError, ValueError)


@dataclass(frozen=True)
class Plan:
    """``duration``, ``fault_every``, ``answer_limit``, ``stop_limit``: seconds. ``claims``: bytes of one replica of each
    model of which that is known.
    """

    seed: int
    duration: float
    targets: Sequence[Target]
    claims: dict[str, int]
    clients: int = 16
    fault_every: float = 5.0
    answer_limit: float = 150.0
    """A request without an end after so long is lost."""
    stop_limit: float = 30.0


class Run:
    """Make one and await ``run``; what was found is in its attributes, whole or not."""

    def __init__(self, plan: Plan, serving: Serving) -> None:
        self.plan = plan
        self.serving = serving
        self.told: list[Told] = []
        self.asked: Counter[str] = Counter()
        """Requests by kind."""
        self.violations: list[Violation] = []
        self.resident: list[tuple[float, int]] = []
        self.before: Sight | None = None
        self.after: Sight | None = None
        self.exit_status: int | None = None
        self.slowest_health = 0.0
        self.healths = 0
        self.stopping = False
        self.breaker = Breaker(serving, self._send)
        self._began = time.monotonic()
        self._sending: set[asyncio.Task[None]] = set()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def stop(self) -> None:
        """Break nothing and ask nothing any more, and go on to the end."""
        self.stopping = True

    async def run(self) -> None:
        """Raises ServerFailed when it does not come up; afterwards everything is a violation."""
        await self.serving.start()
        self.before = await self._warm_up()
        self._began = time.monotonic()
        await self._storm()
        if self.serving.alive:
            await self._calm()
            await self._end()
        else:
            self._report([Violation("the server lives", f"it ended with {self.serving.process.returncode}")])
            self._compare()
        self._explain()

    # --- the load and the faults --------------------------------------------------------------------------------------

    async def _storm(self) -> None:
        watches = [asyncio.create_task(one) for one in (self._watch_health(), self.breaker.tend(), self._heal())]
        works: list[Coroutine[Any, Any, None]] = [self._client(number) for number in range(self.plan.clients)]
        try:
            await asyncio.gather(*works, self._break())
            self.breaker.go_on(float("inf"))
            while self._sending:
                await asyncio.wait(self._sending)
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    def _over(self) -> bool:
        return self.stopping or self.elapsed >= self.plan.duration or not self.serving.alive

    async def _client(self, number: int) -> None:
        for ask in asks_of(self.plan.seed, number, self.plan.targets):
            await asyncio.sleep(ask.pause)
            if self._over():
                return
            await self._exchange(ask)

    async def _break(self) -> None:
        for fault in faults_of(self.plan.seed, self.plan.targets, self.plan.fault_every):
            due = self.elapsed + fault.gap
            while self.elapsed < due:
                if self._over():
                    return
                await asyncio.sleep(min(0.1, max(0.0, due - self.elapsed)))
            await self.breaker.apply(fault, self.elapsed)

    def _send(self, ask: Ask) -> None:
        task = asyncio.create_task(self._exchange(ask))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _exchange(self, ask: Ask) -> None:
        self.asked[ask.kind] += 1
        told, violations = judge(await exchange(ask, self.serving.host, self.serving.port, self.plan.answer_limit))
        self.told.append(told)
        self._report(violations)

    # --- watching -----------------------------------------------------------------------------------------------------

    async def _watch_health(self) -> None:
        while True:
            began = time.monotonic()
            try:
                status, _ = await self.serving.ask("GET", "/health", limit=10 * _HEALTH_WITHIN)
                took = time.monotonic() - began
                problem = "" if status == 200 else f"status {status}"
                self.resident.append((self.elapsed, self.serving.resident()))
                now = await self.serving.sight()
                self._report(leftovers.overcommitted(now) + leftovers.promised(now, self.plan.claims))
            except (*_UNREACHABLE, ServerFailed) as error:
                problem = repr(error)
                took = time.monotonic() - began
            self.healths += 1
            self.slowest_health = max(self.slowest_health, took)
            if problem or took > _HEALTH_WITHIN:
                self._report([Violation("always healthy", problem or f"it took {took:.1f} s")])
            await asyncio.sleep(_HEALTH_EVERY)

    async def _heal(self) -> None:
        """An operator who loads what has failed for good, so that there is always something to break."""
        while True:
            await asyncio.sleep(1.0)
            with contextlib.suppress(*_UNREACHABLE):
                for model in {one["model"] for one in await self.serving.replicas() if one["state"] == "failed"}:
                    await self.serving.ask("POST", f"/admin/models/{model}/load", admin=True)

    # --- before and after ---------------------------------------------------------------------------------------------

    async def _warm_up(self) -> Sight:
        """Every kind of request once, so that what is made at first need is there; then the server at rest, empty."""
        numbers = count()
        for target in self.plan.targets:
            usual = Ask(
                id="", kind="chat" if target.generates else "embedding", model=target.name, scripted=target.scripted
            )
            for kind in ("chat", "completion", "infer") if target.generates else ("embedding",):
                ask = replace(usual, id=f"w{next(numbers)}", kind=kind, scripted=target.scripted and target.generates)
                await self._exchange(ask)
        await self._reach(lambda now: "probe" in now.children.values())  # it starts a second after the server
        return await self._emptied()

    async def _calm(self) -> None:
        """No load any more: it settles, what it holds is what lives; empty, nothing is left over."""
        try:
            await self._reach(lambda now: not leftovers.unsettled(now))
            settled = await self._reach(lambda now: not leftovers.claims(now, self.plan.claims))
            self._report(leftovers.claims(settled, self.plan.claims))
            before = self.before
            assert before is not None
            self.after = await self._emptied(lambda now: not leftovers.left_over(before, now))
            self._report(leftovers.left_over(before, self.after))
            self._report(leftovers.growth(self.resident))
            self._report(ledgers.count(self.told, self.serving.lines()[0], self.after))
        except _UNREACHABLE as error:
            self._report([Violation("the server comes to rest", repr(error))])

    async def _emptied(self, good: Callable[[Sight], bool] = lambda now: not leftovers.unsettled(now)) -> Sight:
        """The server with no model in memory, once it is ``good``, or as it is when it does not become so."""
        for model in {model for model, _ in (await self.serving.sight()).states}:
            await self.serving.ask("POST", f"/admin/models/{model}/unload", admin=True)
        return await self._reach(
            lambda now: all(state in ("stopped", "failed") for _, state in now.states) and good(now)
        )

    async def _reach(self, good: Callable[[Sight], bool]) -> Sight:
        end = time.monotonic() + _SETTLE
        now = await self.serving.sight()
        while not good(now) and time.monotonic() < end:
            await asyncio.sleep(0.2)
            now = await self.serving.sight()
        return now

    async def _end(self) -> None:
        """SIGTERM in the middle of a few last requests."""
        first = self.plan.targets[0]
        last = Ask(
            id="",
            kind="completion",
            model=first.name,
            scripted=first.scripted,
            stream=True,
            tokens=200,
            max_tokens=200,
        )
        for number in range(3 if first.generates else 0):
            self._send(replace(last, id=f"z{number}", latency=0.04))
        await asyncio.sleep(0.3)
        self.exit_status = await self.serving.stop(self.plan.stop_limit)
        while self._sending:
            await asyncio.wait(self._sending)
        if self.exit_status != 0:
            what = "it is still there" if self.exit_status is None else f"status {self.exit_status}"
            self._report([Violation("SIGTERM ends it well", what)])
        self._report(
            [Violation("nothing is left over", f"process {pid} outlived it") for pid in self.serving.survivors()]
        )
        if self.serving.admin_socket.exists():
            self._report([Violation("nothing is left over", "the admin socket is still there")])
        self._compare()

    def _compare(self) -> None:
        lines, junk = self.serving.lines()
        self._report(ledgers.compare(self.told, lines))
        self._report(leftovers.complaints(lines, junk))

    def _report(self, violations: Iterable[Violation]) -> None:
        for one in violations:
            if len(self.violations) < _MOST_VIOLATIONS:
                self.violations.append(replace(one, at=round(self.elapsed, 2)))

    def _explain(self) -> None:
        """Put beside each violation what the log says of its request."""
        texts = self.serving.log_file.read_text(errors="replace").splitlines()
        for place, one in enumerate(self.violations):
            if one.request:
                about = tuple(text for text in texts if f'"{one.request}"' in text)
                self.violations[place] = replace(one, log=about[-5:])


async def run_once(plan: Plan, config: Path, directory: Path, watch: Callable[[Run], None]) -> Run:
    """The whole run; ``watch`` is called with it before it begins. Nothing of the server is left, whatever happens.

    Raises ServerFailed when it does not come up.
    """
    serving = Serving(config, directory)
    try:
        run = Run(plan, serving)
        watch(run)
        await run.run()
    finally:
        serving.kill()
    return run


def environment() -> dict[str, Any]:
    """What the machine is, for a report."""
    system = os.uname()
    return {"system": system.sysname, "release": system.release, "machine": system.machine, "cores": os.cpu_count()}
