"""S16: what each kind of fault costs in time: death, hang, disconnect, slow reader, deadline, renderer, the front's own end.

python benchmarks/faults.py [--runs 5] [--quick]
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import last_resorts
import peers
import psutil
import uvloop
from command import main
from recovery import STREAMS, Stream, kill
from scenario import Comparison, Options, Scenario

from slimproc.chat.templates import Renderer, Template

STALL_TIMEOUT = 2.0
DEADLINE = 0.5
SHUTDOWN_TIMEOUT = 1.0
LIMITS_MS = {
    "death to the last error event": 1000.0,
    "death to READY, beyond the load": 1000.0,
    "hang to kill, beyond stall_timeout": 2000.0,
    "death of another replica, p99 gap of a stream": 0.0,
    "disconnect to its slot freed": 200.0,
    "unread stream to its slot freed": 1000.0,
    "unread stream, p99 gap of another": 0.0,
    "renderers killed to a text from another": 100.0,
    "renderers killed to a chat's answer": 1000.0,
    "deadline overshoot in the queue": 100.0,
    "deadline overshoot in prefill": 100.0,
    "deadline overshoot in mid-stream": 100.0,
    "front killed to its engines gone": 1000.0,
    "front killed to the next one's answer": 5000.0,
    "SIGTERM to exit, beyond shutdown_timeout": 2000.0,
    **last_resorts.LIMITS_MS,
}
"""What is promised of each, in milliseconds; 0: less than twice what it is without the fault."""
GAPS_FOR = 1.0
"""Seconds in which a stream's gaps are looked at, before a fault and from it on."""
_UNREAD = '!fake {"tokens": ["' + "x" * 4000 + '"], "repeat": 100000}'
_CHAT = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}'
_PACE = '!fake {"token_latency": 0.002}'
_PREFILL = '!fake {"prefill_steps": 100000, "prefill_latency": 0.002}'


@contextlib.contextmanager
def serving(*, port: int = 0, replicas: int = 1) -> Iterator[peers.Slimproc]:
    model = {"backend": "fake", "slots": STREAMS // replicas, "context": 1_000_000, "replicas": replicas}
    config = {"stall_timeout": STALL_TIMEOUT, "shutdown_timeout": SHUTDOWN_TIMEOUT, "models": {"fake": model}}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(json.dumps(config))  # which is YAML
        file.flush()
        with peers.running(peers.Slimproc("--config", file.name, port=port)) as server:
            assert isinstance(server, peers.Slimproc)
            yield server


def death(server: peers.Slimproc) -> dict[str, float]:
    seen = kill(server, _PACE)
    return {
        "death to the last error event": seen["error_ms"],
        "death to READY, beyond the load": seen["beyond_load_ms"],
    }


def hang(server: peers.Slimproc) -> dict[str, float]:
    """Until its clients hear of it, which is after the kill."""
    server.admin("POST", f"/admin/models/{server.replica()['model']}/load")  # earlier deaths do not count
    stream = Stream(server.port, _PACE)
    before = server.replica()
    os.kill(before["pid"], signal.SIGSTOP)
    stopped = time.monotonic()
    while not stream.failed:
        stream.take()
    took = time.monotonic() - stopped
    stream.sock.close()
    peers.wait_until(lambda: server.replica()["state"] == "ready", "it is ready again")
    return {"hang to kill, beyond stall_timeout": (took - STALL_TIMEOUT) * 1000}


def _gaps(stream: Stream, seconds: float) -> list[float]:
    """Milliseconds between two pieces of it that came."""
    found: list[float] = []
    last, end = time.monotonic(), time.monotonic() + seconds
    while last < end:
        stream.take()
        now = time.monotonic()
        found.append((now - last) * 1000)
        last = now
    return found


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[-1]


def bystander() -> dict[str, float]:
    """Another replica's stream, when an engine dies beside it; also what its gaps were before."""
    with serving(replicas=2) as server:
        streams = [Stream(server.port, _PACE) for _ in range(2)]
        lost = server.admin("GET", "/admin/replicas")["replicas"][0]
        kept = streams[1]
        before = _p99(_gaps(kept, GAPS_FOR))
        os.kill(lost["pid"], signal.SIGKILL)
        try:
            after = _p99(_gaps(kept, GAPS_FOR))
        except RuntimeError:  # it was this one's engine
            kept = streams[0]
            after = _p99(_gaps(kept, GAPS_FOR))
        for stream in streams:
            stream.sock.close()
    return {"death of another replica, p99 gap of a stream": after, "p99 gap before a death": before}


def unread(server: peers.Slimproc) -> dict[str, float]:
    """A client that takes nothing: from when its sequence is seen to run, until it is seen no more. All that the buffers
    take is made in between.
    """
    other = Stream(server.port, _PACE)
    with contextlib.closing(other.sock):
        before = _p99(_gaps(other, GAPS_FOR))
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", server.port))
        body = json.dumps({"prompt": _UNREAD, "max_tokens": 100_000, "stream": True}).encode()
        deaf.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        began = time.monotonic()
        gaps: list[float] = []
        peers.wait_until(lambda: server.replica()["sequences"] == 2, "the unread one runs, too")
        while server.replica()["sequences"] > 1:
            if time.monotonic() - began > peers.LIMIT:
                raise RuntimeError("nobody drops a stream that is not read")
            gaps += _gaps(other, 0.05)
        took = time.monotonic() - began
        gaps += _gaps(other, GAPS_FOR)
        deaf.close()
    return {
        "unread stream to its slot freed": took * 1000,
        "unread stream, p99 gap of another": _p99(gaps),
        "p99 gap before an unread stream": before,
    }


def renderers(server: peers.Slimproc) -> dict[str, float]:
    """Both at once, and a chat which comes then."""
    children = psutil.Process(server.process.pid).children()
    for child in children:
        if "slimproc.chat.renderer" in child.cmdline():
            child.kill()
    killed = time.monotonic()
    while peers.status(server.port, "/v1/chat/completions", _CHAT) != 200:
        if time.monotonic() - killed > peers.LIMIT:
            raise RuntimeError("no renderer comes back")
    return {"renderers killed to a chat's answer": (time.monotonic() - killed) * 1000}


def renderers_alone() -> dict[str, float]:
    """Without a server, whose engine and connection are in a chat's answer."""
    return {"renderers killed to a text from another": uvloop.run(_another_renderer()) * 1000}


async def _another_renderer() -> float:
    """Seconds."""
    renderer = Renderer()
    await renderer.start()
    try:
        for pid in renderer.statistics().pids:
            os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        await renderer.render(Template("{{ messages[0].content }}"), [{"role": "user", "content": "hi"}])
        return time.monotonic() - killed
    finally:
        await renderer.close()


def disconnect(server: peers.Slimproc) -> dict[str, float]:
    """By the list of replicas, asked for again and again: what that takes is in it."""
    stream = Stream(server.port, _PACE)
    stream.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.sock.close()
    left = time.monotonic()
    while server.replica()["sequences"]:
        if time.monotonic() - left > peers.LIMIT:
            raise RuntimeError("the slot is not freed")
    return {"disconnect to its slot freed": (time.monotonic() - left) * 1000}


def deadlines(server: peers.Slimproc) -> dict[str, float]:
    found = {f"deadline overshoot in {where}": _overshoot(server, prompt, stream=stream) for where, prompt, stream in (
        ("prefill", _PREFILL, False), ("mid-stream", _PACE, True),
    )}  # fmt: skip
    holding = [Stream(server.port, '!fake {"token_latency": 0.01}') for _ in range(STREAMS)]
    found["deadline overshoot in the queue"] = _overshoot(server, _PACE, stream=False)
    for one in holding:
        one.sock.close()
    return found


def _overshoot(server: peers.Slimproc, prompt: str, *, stream: bool) -> float:
    """Milliseconds from the deadline to the error."""
    body = json.dumps({"prompt": prompt, "max_tokens": 900_000, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Timeout: {DEADLINE}\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", server.port), timeout=peers.LIMIT) as sock:
        began = time.monotonic()
        sock.sendall(head.encode() + b"\r\n\r\n" + body)
        seen = b""
        while b'"timeout"' not in seen:
            piece = sock.recv(1 << 16)
            if not piece:
                raise RuntimeError(f"no error came: {seen[-500:]!r}")
            seen = seen[-4096:] + piece
        return (time.monotonic() - began - DEADLINE) * 1000


def front_death() -> dict[str, float]:
    with serving() as server:
        stream = Stream(server.port, _PACE)
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.process.kill()
        killed = time.monotonic()
        while any(map(peers.lives, children)):
            if time.monotonic() - killed > peers.LIMIT:
                raise RuntimeError(f"these outlived their front: {children}")
        took = time.monotonic() - killed
        stream.sock.close()
        port = server.port
    return {"front killed to its engines gone": took * 1000, "front killed to the next one's answer": _next_front(port)}


def _next_front(port: int) -> float:
    """Milliseconds from the start of a front in the place of one that was killed to a request that it has served."""
    began = time.monotonic()
    with serving(port=port) as server:
        if peers.status(server.port, "/v1/completions", b'{"prompt": "hi", "max_tokens": 1}') != 200:
            raise RuntimeError("the next front does not serve")
        return (time.monotonic() - began) * 1000


def orderly_end() -> dict[str, float]:
    """With streams that take longer than they may."""
    with serving() as server:
        streams = [Stream(server.port, _PACE) for _ in range(STREAMS)]
        server.process.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        while not all(stream.failed for stream in streams):
            for stream in streams:
                if not stream.failed:
                    stream.take()
        status = server.process.wait(peers.LIMIT)
        took = time.monotonic() - asked
        if status:
            raise RuntimeError(f"it ended with {status}")
        for stream in streams:
            stream.sock.close()
    return {"SIGTERM to exit, beyond shutdown_timeout": (took - SHUTDOWN_TIMEOUT) * 1000}


WITHIN: tuple[Callable[[peers.Slimproc], dict[str, float]], ...] = (
    death, hang, disconnect, unread, renderers, deadlines,
)  # fmt: skip
OF_THE_SERVER: tuple[Callable[[], dict[str, float]], ...] = (
    bystander, renderers_alone, front_death, orderly_end, last_resorts.dying_load, last_resorts.blocked_front,
)  # fmt: skip
WITHOUT = {
    "death of another replica, p99 gap of a stream": "p99 gap before a death",
    "unread stream, p99 gap of another": "p99 gap before an unread stream",
}
"""What a gap is held against."""


def measure(options: Options) -> list[Comparison]:
    runs: list[dict[str, Any]] = []
    for number in range(options.runs):
        with serving() as server:
            for _ in range(1 if options.quick else 5):
                seen: dict[str, float] = {}
                for fault in WITHIN:
                    seen |= fault(server)
                runs.append({"run": number} | seen)
        ends: dict[str, float] = {}
        for end in OF_THE_SERVER:
            ends |= end()
        runs.append({"run": number} | ends)
    return [_comparison(label, limit, runs) for label, limit in LIMITS_MS.items()]


def _comparison(label: str, limit: float, runs: list[dict[str, Any]]) -> Comparison:
    seen = {"slimproc": [run[label] for run in runs if label in run]}
    if not limit:
        seen["without the fault"] = [run[WITHOUT[label]] for run in runs if label in run]
        limit = 0.5  # of a ratio that is above 1 where the fault makes nothing slower
    return Comparison(label, "ms", seen, limit, True, "", runs)


SCENARIOS = [
    Scenario(
        "faults",
        "S16",
        "what faults cost in time: a death, a hang, a disconnect, an unread stream, deadlines, a model that never loads, the front's end",
        f"by the client's clock, on the fake backend with {STREAMS} slots: an engine gets SIGKILL, and SIGSTOP, in "
        "mid-stream; a client resets its connection, another reads nothing; both renderers are killed, also without a server; deadlines pass in the queue, in prefill and in mid-stream; the front "
        "gets SIGKILL, and SIGTERM with streams that take longer than they may. A model dies in every load and is given up after the fifth (its waits are "
        "meant to come to 7 s, a quarter more or less), an operator has it tried again; a front whose loop sleeps is aborted by a watchdog, which this script plays. "
        "What a setting asks to be waited for is taken off. The worst of all is held against what is promised.",
        "the time that a real model's load takes, and steps of a real model, which end a cancelled sequence only between two; systemd's own delay.",
        measure,
    )
]

if __name__ == "__main__":
    sys.exit(main(SCENARIOS, __doc__ or ""))
