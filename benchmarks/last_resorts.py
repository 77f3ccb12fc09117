"""S16's last resorts: a model that is given up since it dies in every load, and a front that is aborted since it hangs."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import peers
import psutil

WAITS = (0.0, 1.0, 2.0, 4.0)
"""Seconds before the second to the fifth try; a fifth death is the last."""
JITTER = 0.25
"""Of a wait, more or less."""
WATCHDOG = 2.0
"""Seconds; as WatchdogSec= in a unit."""
LIMITS_MS = {
    "death in every load, waits until it is given up": (sum(WAITS) * (1 + JITTER) + 1) * 1000,
    "given up to a caller's refusal": 100.0,
    "an operator's load to its next try": 1000.0,
    "front blocked to its engines gone, beyond WatchdogSec": 1000.0,
}
_BLOCKING = """
import signal, sys, time

def _block(*_):
    time.sleep(3600)

if "serve" in sys.orig_argv:
    signal.signal(signal.SIGUSR2, _block)
"""
"""A ``sitecustomize``: the front's loop can be made to hang."""


def dying_load() -> dict[str, float]:
    """Beside a model that serves all the while."""
    dying = {"backend": "fake", "fake": {"die_in_load": int(signal.SIGSEGV)}}
    config = {"log_json": True, "models": {"good": {"backend": "fake"}, "bad": dying}}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(json.dumps(config))  # which is YAML
        file.flush()
        with contextlib.closing(peers.Slimproc("--config", file.name, port=peers.free_port())) as server:
            peers.wait_until(lambda: _changes(server, "failed"), "the dying one is given up")
            took = _waits(server)
            refused = _ask(server, "bad", 503)
            began = time.monotonic()
            server.admin("POST", "/admin/models/bad/load")
            tries = len(WAITS) + 1
            peers.wait_until(lambda: len(_changes(server, "starting")) > tries, "it is tried again", every=0.002)
            again = time.monotonic() - began
            _ask(server, "good", 200)
            if server.replica()["restarts"]:
                raise RuntimeError("the good one did not outlive the other's deaths")
    return {
        "death in every load, waits until it is given up": took * 1000,
        "given up to a caller's refusal": refused * 1000,
        "an operator's load to its next try": again * 1000,
    }


def _changes(server: peers.Slimproc, after: str) -> list[float]:
    """When the dying replica has come into that state, by the log (which has milliseconds)."""
    found = []
    for line in server.log.splitlines():
        if line.startswith("{") and line.endswith("}"):
            record: dict[str, Any] = json.loads(line)
            if record["message"] == "a replica changes" and (record["replica"], record["after"]) == ("bad/0", after):
                found.append(dt.datetime.fromisoformat(record["time"]).timestamp())
    server.check()
    return found


def _waits(server: peers.Slimproc) -> float:
    """Seconds between its deaths and its next tries, all together. RuntimeError when one came too early."""
    deaths, tries = _changes(server, "backoff"), _changes(server, "starting")
    waits = [start - death for death, start in zip(deaths, tries[1:], strict=False)]
    if len(waits) != len(WAITS) or len(deaths) != len(tries):
        raise RuntimeError(f"it was tried {len(tries)} times, and died {len(deaths)} times")
    for wait, least in zip(waits, WAITS, strict=True):
        if wait < least * (1 - JITTER) - 0.01:
            raise RuntimeError(f"a try came after {wait:.3f} s, which is too early: {least} s less {JITTER:.0%}")
    return sum(waits)


def _ask(server: peers.Slimproc, model: str, status: int) -> float:
    """Seconds until the answer, which has that status."""
    began = time.monotonic()
    body = json.dumps({"model": model, "prompt": "hi", "max_tokens": 1}).encode()
    if (seen := peers.status(server.port, "/v1/completions", body)) != status:
        raise RuntimeError(f"{model} answers {seen} and not {status}")
    return time.monotonic() - began


def blocked_front() -> dict[str, float]:
    """From the last that a watchdog hears of it. What systemd does then is done here: SIGABRT, when ``WATCHDOG`` seconds
    have passed in silence.
    """
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"{directory}/notify")
        Path(directory, "sitecustomize.py").write_text(_BLOCKING)
        environ = {
            "NOTIFY_SOCKET": f"{directory}/notify",
            "WATCHDOG_USEC": str(int(WATCHDOG * 1e6)),
            "PYTHONFAULTHANDLER": "1",  # as the unit sets it
            "PYTHONPATH": os.pathsep.join((directory, str(peers.ROOT))),
        }
        with peers.running(peers.Slimproc("--backend", "fake", **environ)) as server:
            children = psutil.Process(server.process.pid).children(recursive=True)
            server.process.send_signal(signal.SIGUSR2)
            heard = _last_ping(manager)
            server.process.send_signal(signal.SIGABRT)
            if server.process.wait(peers.LIMIT) != -signal.SIGABRT:
                raise RuntimeError(f"it ended with {server.process.returncode}")
            while any(map(peers.lives, children)):
                if time.monotonic() - heard > peers.LIMIT:
                    raise RuntimeError(f"these outlived their front: {children}")
            took = time.monotonic() - heard - WATCHDOG
            if "in _block" not in server.log:
                raise RuntimeError(f"it left no stack: {server.log[-2000:]}")
    return {"front blocked to its engines gone, beyond WatchdogSec": took * 1000}


def _last_ping(manager: socket.socket) -> float:
    """Wait until there was none for ``WATCHDOG`` seconds; when the last one came."""
    began = heard = time.monotonic()
    while (left := heard + WATCHDOG - time.monotonic()) > 0:
        if heard - began > peers.LIMIT:
            raise RuntimeError("it is blocked, and goes on telling its watchdog that it lives")
        manager.settimeout(left)
        with contextlib.suppress(TimeoutError):
            if b"WATCHDOG=1" in manager.recv(4096):
                heard = time.monotonic()
    return heard
