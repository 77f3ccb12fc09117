"""Breaker: does to the server what a schedule of faults says, and keeps a record of what it did."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from slimproc.bench.head import HeadError
from slimproc.chaos.schedule import Ask, Fault
from slimproc.chaos.serving import Serving

_SIGNALS: Final = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}
_HELPERS: Final = {"kill_renderer": "renderer", "kill_probe": "probe"}


class Breaker:
    """``send`` puts a request on its way. ``done`` counts faults that hit something, by kind; ``missed`` the others."""

    def __init__(self, serving: Serving, send: Callable[[Ask], None]) -> None:
        self._serving = serving
        self._send = send
        self._stopped: dict[int, float] = {}
        """When each stopped process goes on."""
        self.done: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        self.events: list[dict[str, Any]] = []
        """What was done when, in order."""

    async def apply(self, fault: Fault, at: float) -> None:
        """``at``: seconds since the run began, for the record."""
        target = ""
        with contextlib.suppress(OSError, HeadError, ValueError):
            target = await self._hit(fault)
        (self.done if target else self.missed)[fault.kind] += 1
        self.events.append({"at": round(at, 2), "number": fault.number, "kind": fault.kind, "target": target})

    async def _hit(self, fault: Fault) -> str:
        """What was hit; empty when there was nothing."""
        if fault.asks:
            for ask in fault.asks:
                self._send(ask)
            return fault.model
        if fault.kind == "reload":
            self._serving.process.send_signal(signal.SIGHUP)
            return "configuration"
        if fault.kind in ("load", "unload"):
            status, _ = await self._serving.ask("POST", f"/admin/models/{fault.model}/{fault.kind}", admin=True)
            return fault.model if status == 202 else ""
        kind = _HELPERS.get(fault.kind, "engine")
        if fault.kind not in _SIGNALS and fault.kind not in _HELPERS:
            return ""
        pids = sorted(pid for pid, what in self._serving.children().items() if what == kind)
        if not pids:
            return ""
        pid = pids[min(len(pids) - 1, int(fault.pick * len(pids)))]
        os.kill(pid, _SIGNALS.get(fault.kind, signal.SIGKILL))
        if fault.kind == "stop":
            self._stopped[pid] = time.monotonic() + fault.lasts
        return f"{kind} {pid}"

    async def tend(self) -> None:
        """Let stopped processes go on when it is time, for ever."""
        while True:
            await asyncio.sleep(0.05)
            self.go_on(time.monotonic())

    def go_on(self, now: float) -> None:
        """Those that are due at ``now``."""
        for pid in [pid for pid, due in self._stopped.items() if due <= now]:
            del self._stopped[pid]
            if pid in self._serving.children():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT)
