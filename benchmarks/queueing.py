"""Queueing: with a service time that is known, do requests wait as long as they must, and no longer?

python benchmarks/queueing.py [--runs 5] [--quick] [--slim-serve PATH]
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import answers
import peers
import usage
from command import main
from scenario import Comparison, Options, Place, Scenario, interleave


@dataclass(frozen=True)
class Service:
    """What serves: so many slots, each of which takes ``seconds`` for an answer, whoever is beside it."""

    slots: int
    tokens: int
    ttft: float
    token_latency: float

    @property
    def seconds(self) -> float:
        return self.ttft + (self.tokens - 1) * self.token_latency

    def ideal(self, clients: int) -> float:
        """Seconds of an answer with so many clients in a closed loop, once they take turns: by Little's law."""
        return self.seconds * max(1.0, clients / self.slots)


ONE = Service(slots=1, tokens=10, ttft=0.02, token_latency=0.02)
FOUR = Service(slots=4, tokens=1, ttft=0.2, token_latency=0.0)
"""One token, since the fake backend's sequences keep in step: what is beside one would change when its tokens come."""
CLIENTS = {1: (1, 2, 4, 8), 4: (4, 8, 16)}
"""By slots."""
_TURNS = 5
"""Answers of each client; the first does not count."""


def quick(service: Service) -> Service:
    return Service(service.slots, service.tokens, service.ttft / 20, service.token_latency / 20)


def ours(service: Service, config: Path) -> peers.Server:
    fake = {"ttft": service.ttft, "token_latency": service.token_latency}
    model = {"backend": "fake", "slots": service.slots, "max_queue": 64, "fake": fake}
    config.write_text(json.dumps({"log_level": "warning", "models": {"fake": model}}))
    return peers.Slimproc("--config", str(config), port=peers.free_port())


def slim_serve(executable: Path, service: Service) -> peers.Server:
    """As many replicas as there are slots: each runs one answer at a time."""
    port = peers.free_port()
    return peers.Server(
        "slim-serve",
        [str(executable), "serve"],
        port=port,
        SLM_ENGINE="fake",
        SLM_PORT=str(port),
        SLM_REPLICAS=str(service.slots),
        SLM_LOG_LEVEL="WARNING",
        SLM_FAKE_TTFT_S=str(service.ttft),
        SLM_FAKE_TOKEN_LATENCY_S=str(service.token_latency),
    )


def side(start: Callable[[], peers.Server], service: Service, clients: tuple[int, ...]) -> dict[str, Any]:
    """A fresh server, and all numbers of clients one after the other: what was seen, by that number."""
    found: dict[str, Any] = {}
    with peers.running(start()) as server:
        answers.drive(server.port, answers.requests(2, tokens=service.tokens, stream=True), streams=1)
        for count in clients:
            before = usage.cpu(server)
            asked = answers.requests(count * _TURNS, tokens=service.tokens, stream=True)
            loop = answers.drive(server.port, asked, streams=count)
            after = usage.cpu(server)
            answers.check_events(loop, service.tokens)
            found[str(count)] = _seen(loop, service) | {"cpu_s": {name: after[name] - before[name] for name in before}}
        found["memory_mib"] = usage.memory(server)
    return found


def _seen(loop: answers.Loop, service: Service) -> dict[str, Any]:
    """``wait_ms``: to the first token, beyond what that takes without a queue; ``rest_ms``: from there to the end."""
    steady = loop.steady()
    return {
        "latency_ms": loop.mean_steady_s * 1000,
        "wait_ms": statistics.fmean(one.first_s - service.ttft for one in steady) * 1000,
        "rest_ms": statistics.fmean(one.seconds - one.first_s for one in steady) * 1000,
        "answers_per_s": loop.per_s,
        "all_first_ms": [one.first_s * 1000 for one in loop.answers],
        "all_latency_ms": [one.seconds * 1000 for one in loop.answers],
    }


def of(service: Service, options: Options, executable: Path | None) -> list[Comparison]:
    clients = CLIENTS[service.slots][: 2 if options.quick else None]
    service = quick(service) if options.quick else service
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "slimproc.yaml"
        sides = {"slimproc": lambda: side(lambda: ours(service, config), service, clients)}
        if executable is not None:
            sides["slim-serve"] = lambda: side(lambda: slim_serve(executable, service), service, clients)
        seen = interleave(sides, options.runs)
    slots = f"{service.slots} slot{'s' if service.slots > 1 else ''} of {service.seconds * 1000:g} ms"
    found = [_compare(f"{slots}, {count} client{'s' if count > 1 else ''}", service, seen, count) for count in clients]
    found[0].runs = [run for turn in zip(*seen.values(), strict=True) for run in turn]
    return found


def _compare(label: str, service: Service, seen: dict[str, list[dict[str, Any]]], clients: int) -> Comparison:
    latencies = {name: [run[str(clients)]["latency_ms"] for run in runs] for name, runs in seen.items()}
    ideal = service.ideal(clients) * 1000
    values = {"slimproc": latencies.pop("slimproc"), "ideal": [ideal] * len(seen["slimproc"]), **latencies}
    place = Place(f"{service.slots} slots" if service.slots > 1 else "1 slot", clients, "clients in a closed loop")
    must = ideal - service.seconds * 1000
    parts = []
    for name, runs in seen.items():
        wait, rest = (statistics.median(run[str(clients)][key] for run in runs) for key in ("wait_ms", "rest_ms"))
        parts.append(f"{name} waits {wait:.1f} ms, which must be {must:.0f}, and then speaks for {rest:.1f} ms")
    return Comparison(f"{label}: mean latency", "ms", values, None, True, "; ".join(parts), place=place)


def measure(options: Options) -> list[Comparison]:
    executable = peers.find_slim_serve(options.slim_serve)
    found = [comparison for service in (ONE, FOUR) for comparison in of(service, options, executable)]
    missing = executable is None
    found[
        0
    ].note += f". {peers.SLIM_SERVE_MISSING if missing else f'slim-serve {peers.slim_serve_version(executable)}'}"
    return found


SCENARIOS = [
    Scenario(
        "queueing",
        "",
        "requests that wait for a slot, with a service time that is known, against the ideal line",
        f"closed loops of streaming requests on the fake backend, whose answers take {ONE.seconds * 1000:g} ms: with one slot "
        f"(a first token after {ONE.ttft * 1000:g} ms, and {ONE.tokens - 1} more at that distance) and with {FOUR.slots} (one "
        f"token after {FOUR.seconds * 1000:g} ms). The ideal is what that many servers without any cost give: with N clients "
        f"and c slots an answer takes N/c service times. Means over each client's {_TURNS} answers but the first. Every wait "
        "that is longer, and every distance between tokens that grows with the queue, is a cost of ours. slim-serve beside "
        "it has one replica for each slot.",
        "a real model, whose service time changes with its batch; arrivals that do not wait for an answer (S9).",
        measure,
    )
]

if __name__ == "__main__":
    sys.exit(main(SCENARIOS, __doc__ or ""))
