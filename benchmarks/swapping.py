"""Swap: what it costs to load one model in another's place, and whether anything is lost or left over in doing so.

python benchmarks/swapping.py [--runs 5] [--quick]
"""

from __future__ import annotations

import http.client
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import peers
from command import main
from scenario import SMOLLM2, Comparison, Options, Scenario

SWAP_LIMIT = 1.2
"""Times the model's own load, beside the drain of the one that goes."""
ALTERNATIONS = 100
CLIENTS = 4
_GIB = 1 << 30
_TOKENS = 8


def _config(models: dict[str, dict[str, Any]], room: int) -> str:
    """JSON, which is YAML."""
    return json.dumps({"memory": {"margin": 0, "host_limit": room}, "preload": ["a"], "models": models})


def _fake() -> str:
    one = {"backend": "fake", "fake": {"bytes": 700 << 20, "load_time": 0.3}, "slots": CLIENTS}
    return _config({"a": one, "b": one}, _GIB)


def _smollm2(path: str) -> str:
    profile = {"load_peak": 600 << 20, "inference_peak": 600 << 20}
    one = {"backend": "llama_cpp", "path": path, "slots": CLIENTS, "context": 512, "memory": profile}
    return _config({"a": one, "b": one}, _GIB)


@contextmanager
def serving(config: str) -> Iterator[peers.Slimproc]:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(config)
        file.flush()
        with peers.running(peers.Slimproc("--config", file.name)) as server:
            assert isinstance(server, peers.Slimproc)
            yield server


def ask(server: peers.Slimproc, model: str) -> float:
    """Seconds that one short answer took. RuntimeError for anything but an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=peers.LIMIT)
    body = json.dumps({"model": model, "prompt": "Once upon a time", "max_tokens": _TOKENS, "ignore_eos": True})
    began = time.monotonic()
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{model}: {answer.status} {text[:300]!r}")
    return time.monotonic() - began


def replica(server: peers.Slimproc, model: str) -> dict[str, Any]:
    found = server.admin("GET", "/admin/replicas")["replicas"]
    return next(one for one in found if one["model"] == model)


def metric(server: peers.Slimproc, beginning: str) -> int:
    """The sum of the series that begin like that."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=peers.LIMIT)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return sum(int(float(line.rpartition(" ")[2])) for line in text.splitlines() if line.startswith(beginning))


def held(server: peers.Slimproc) -> int:
    """Bytes that the ledger holds on the host."""
    return metric(server, 'slimproc_memory_bytes{device="host",kind="held"}')


def evictions(server: peers.Slimproc) -> int:
    return metric(server, "slimproc_evictions_total{")


def swaps(server: peers.Slimproc, count: int) -> list[dict[str, Any]]:
    """One client. What a request for a model costs beyond a warm one, in milliseconds: with nothing in memory, and with
    the other model there.
    """
    seen = []
    for turn in range(count):
        model, other = "ab" if turn % 2 else "ba"
        for one in "ab":
            server.admin("POST", f"/admin/models/{one}/unload?wait=true")
        alone = ask(server, model)
        warm = ask(server, model)
        ask(server, other)
        swapped = ask(server, model)
        seen.append(
            {
                "model": model,
                "swap_ms": (swapped - warm) * 1000,
                "alone_ms": (alone - warm) * 1000,
                "warm_ms": warm * 1000,
            }
        )
    return seen


def alternate(server: peers.Slimproc, count: int) -> dict[str, Any]:
    """``CLIENTS`` clients at once ask for the two models by turns until these have made room for one another ``count``
    times.
    """
    before, evicted = held(server), evictions(server)
    failures: list[str] = []
    answers: list[float] = []
    enough = threading.Event()

    def client(place: int) -> None:
        turn = place
        while not enough.is_set():
            turn += 1
            try:
                answers.append(ask(server, "ab"[turn % 2]))
            except (RuntimeError, OSError) as error:
                failures.append(str(error))

    clients = [threading.Thread(target=client, args=(place,)) for place in range(CLIENTS)]
    for one in clients:
        one.start()
    try:
        peers.wait_until(lambda: evictions(server) - evicted >= count, f"{count} swaps", limit=10 * peers.LIMIT)
    finally:
        enough.set()
        for one in clients:
            one.join()
    ask(server, "a")
    peers.wait_until(lambda: replica(server, "b")["state"] == "stopped", "only one model is left")
    requests = len(answers) + len(failures)
    return {"swaps": count, "requests": requests, "failures": failures, "drift": held(server) - before}


def measure(options: Options) -> list[Comparison]:
    turns, count = (2, 8) if options.quick else (10, ALTERNATIONS)
    found = []
    for name, config in (("fake", _fake()), ("SmolLM2", _smollm2(options.model or SMOLLM2))):
        seen, ends = [], []
        for run in range(options.runs):
            with serving(config) as server:
                seen += [{"run": run} | swap for swap in swaps(server, turns)]
                ends.append({"run": run} | alternate(server, count))
        found += _of(name, seen, ends)
    return found


def _of(name: str, seen: list[dict[str, Any]], ends: list[dict[str, Any]]) -> list[Comparison]:
    costs = {"swap": [one["swap_ms"] for one in seen], "load alone": [one["alone_ms"] for one in seen]}
    failures = {"slimproc": [float(len(one["failures"])) for one in ends]}
    drift = {"slimproc": [float(abs(one["drift"])) for one in ends]}
    note = f"{len(seen)} swaps; the target is {SWAP_LIMIT} times the load"
    asked = sum(one["requests"] for one in ends)
    return [
        Comparison(f"{name}: a swap against the load alone", "ms", costs, 1 / SWAP_LIMIT, True, note, seen),
        Comparison(
            f"{name}: failures while the two alternate {ends[0]['swaps']} times",
            "requests",
            failures,
            0.5,
            True,
            f"of {asked} requests of {CLIENTS} clients",
            ends,
        ),
        Comparison(f"{name}: bytes that the ledger holds more than before them", "bytes", drift, 0.5, True),
    ]


SCENARIOS = [
    Scenario(
        "swap",
        "S14",
        "two models that do not fit together: a swap against the model's own load; 100 alternations under load",
        "a request for the model that is not in memory, less the same request when it is: with the other model there, which "
        "has to go first, against with nothing there. Then four clients that ask for both models by turns, until these have "
        "made room for one another 100 times: how many requests failed, and how many bytes the ledger holds at the end beyond what it held at the start.",
        "a drain: the model that goes is idle in the first part. A GPU, whose driver gives memory back late.",
        measure,
    )
]

if __name__ == "__main__":
    sys.exit(main(SCENARIOS, __doc__ or ""))
