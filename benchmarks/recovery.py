"""S12: an engine is killed in mid-stream: how long until its clients hear of it, and until the model is READY again.

python benchmarks/recovery.py [--runs 5] [--quick]
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
from typing import Any

import peers
from command import main
from scenario import SMOLLM2, Comparison, Options, Scenario

from slimproc import model_path
from slimproc.errors import LoadFailed

STREAMS = 4
ERROR_LIMIT_MS = 50.0
READY_LIMIT_MS = 300.0
_FAKE_PROMPT = '!fake {"token_latency": 0.002}'


class Stream:
    """One streaming request that has begun to answer."""

    def __init__(self, port: int, prompt: str) -> None:
        body = json.dumps({"prompt": prompt, "max_tokens": 3000, "stream": True, "ignore_eos": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=peers.LIMIT)
        self.sock.sendall(head.encode() + b"\r\n\r\n" + body)
        self.seen = b""
        while b'"text":' not in self.seen:
            self.take()

    def take(self) -> None:
        got = self.sock.recv(1 << 16)
        self.seen = self.seen[-4096:] + got
        if not got or (b"HTTP/1.1 200" not in self.seen and self.seen.startswith(b"HTTP/1.1")):
            raise RuntimeError(f"the stream ended early: {self.seen[-500:]!r}")

    @property
    def failed(self) -> bool:
        """The error event has come, whole."""
        at = self.seen.find(b'data: {"error"')
        return at >= 0 and b"\n\n" in self.seen[at:]


def kill(server: peers.Slimproc, prompt: str) -> dict[str, Any]:
    """One death, from SIGKILL to READY. Times in milliseconds."""
    # An operator's load clears the count of failures, so that the next restart has no back-off to wait for.
    server.admin("POST", f"/admin/models/{server.replica()['model']}/load")
    streams = [Stream(server.port, prompt) for _ in range(STREAMS)]
    before = server.replica()
    killed = time.monotonic()
    os.kill(before["pid"], signal.SIGKILL)
    heard = _wait_errors(streams, killed)
    ready, after = _wait_ready(server, before)
    if any(b'"engine_crashed"' not in stream.seen for stream in streams):
        raise RuntimeError(f"the error was not engine_crashed: {streams[0].seen[-500:]!r}")
    for stream in streams:
        stream.sock.close()
    total = (ready - killed) * 1000
    load = after["load_seconds"] * 1000
    return {
        "errors_ms": [moment * 1000 for moment in heard],
        "error_ms": max(heard) * 1000,
        "ready_ms": total,
        "load_ms": load,
        "beyond_load_ms": total - load,
    }


def _wait_errors(streams: list[Stream], killed: float) -> list[float]:
    """Seconds from the death to each stream's error event."""
    heard = []
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.sock, selectors.EVENT_READ, stream)
        while selector.get_map():
            ready = selector.select(peers.LIMIT)
            if not ready:
                raise RuntimeError("no error event came")
            for key, _ in ready:
                stream = key.data
                stream.take()
                if stream.failed:
                    heard.append(time.monotonic() - killed)
                    selector.unregister(stream.sock)
    return heard


def _wait_ready(server: peers.Slimproc, before: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """The instant at which the replica became READY again, by its own word how long it has been, and that word."""

    def ready() -> tuple[float, dict[str, Any]] | None:
        asked = time.monotonic()
        found = server.replica()
        if found["state"] != "ready" or found["restarts"] == before["restarts"]:
            return None
        return asked - found["since"], found

    found: tuple[float, dict[str, Any]] = peers.wait_until(ready, "the replica is ready again")
    return found


def deaths(arguments: tuple[str, ...], prompt: str, options: Options) -> list[dict[str, Any]]:
    """A fresh server a run, and several deaths in each."""
    seen = []
    for number in range(options.runs):
        with peers.running(peers.Slimproc("--slots", str(STREAMS), "--context", "4096", *arguments)) as server:
            assert isinstance(server, peers.Slimproc)
            seen += [{"run": number} | kill(server, prompt) for _ in range(2 if options.quick else 10)]
    return seen


def measure(options: Options) -> list[Comparison]:
    found = _of("fake", deaths(("--backend", "fake"), _FAKE_PROMPT, options))
    if options.quick:
        return found
    try:
        model_path.resolve(SMOLLM2)
    except LoadFailed as error:
        print(f"SmolLM2 is left out: {error.message}", file=sys.stderr)
        return found
    return found + _of("SmolLM2", deaths(("--model", SMOLLM2), "Once upon a time", options))


def _of(name: str, seen: list[dict[str, Any]]) -> list[Comparison]:
    errors = {"slimproc": [death["error_ms"] for death in seen]}
    ready = {"slimproc": [death["beyond_load_ms"] for death in seen]}
    loads = sorted(death["load_ms"] for death in seen)
    note = f"{len(seen)} deaths, {STREAMS} streams each; load() took {loads[len(loads) // 2]:.0f} ms (median)"
    return [
        Comparison(f"{name}: SIGKILL to the last client's error event", "ms", errors, ERROR_LIMIT_MS, True, note, seen),
        Comparison(f"{name}: SIGKILL to READY, less load()", "ms", ready, READY_LIMIT_MS, True),
    ]


SCENARIOS = [
    Scenario(
        "recovery",
        "S12",
        "an engine killed in mid-stream: the clients' error event, and READY again",
        "four streams are running when the engine gets SIGKILL. By the client's clock: from the signal to the last of the "
        "four error events; and to the moment at which the replica says it became READY, less the time that the engine "
        "says its load took (the backend's import and load()). An operator's load before each death clears the count of "
        "failures, so that there is no back-off in it. The worst of all deaths is held against the target.",
        "back-off after repeated deaths, which is meant to be long, and the time that the load itself takes.",
        measure,
    )
]

if __name__ == "__main__":
    sys.exit(main(SCENARIOS, __doc__ or ""))
