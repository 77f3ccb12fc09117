"""The load client: closed-loop SSE requests over a few connections, counted at the speed of ``bytes.count``.

    python benchmarks/client.py PORT [--streams 32] [--requests 32] [--tokens 1000] [--path /v1/completions]

One process and one poll loop, which never parses an event, so that it takes little from the server beside it; its own
CPU time is in the line of JSON that it prints. Every prompt begins with the request's number, so that none is a prefix
of another.
"""

from __future__ import annotations

import argparse
import json
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

EVENT = b"data: "
END = b"\r\n0\r\n\r\n"
TAIL = len(END) - 1
"""Bytes kept of each read, so that a mark cut in two is still found."""
BUFFER = 1 << 18
LIMIT = 60.0
"""Seconds without a byte from anyone, after which the run is given up."""


class Connection:
    """One keep-alive connection and the answer that it is reading."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=LIMIT)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setblocking(True)  # with a timeout, Python would poll before each call, as we have just done
        self.receive_into = self.sock.recv_into
        self.tail: bytes | bytearray = b""
        """The end of what came before; empty: nothing of this answer has come."""
        self.events = 0
        self.began = self.first = 0.0

    def send(self, request: bytes) -> None:
        self.tail = b""
        self.events = 0
        self.began, self.first = time.perf_counter(), 0.0
        self.sock.sendall(request)


class Load:
    """All connections together. ``run`` returns what was seen."""

    def __init__(self, port: int, streams: int, requests: Iterator[bytes]) -> None:
        self._requests = requests
        self._connections = {c.sock.fileno(): c for c in (Connection(port) for _ in range(streams))}
        self._buffer = bytearray(TAIL + BUFFER)
        self._into = memoryview(self._buffer)[TAIL:]
        self.bytes = self.reads = self.events = 0
        self.first_seconds: list[float] = []
        self.seconds: list[float] = []

    def run(self) -> dict[str, float]:
        poll, wait = _poll()
        began, used = time.perf_counter(), _cpu()
        for fd, connection in self._connections.items():
            poll.register(fd, select.POLLIN)
            self._next(connection)
        open_ones = len(self._connections)
        while open_ones:
            ready = poll.poll(wait)
            if not ready:
                sys.exit(f"client: nothing came for {LIMIT:g} s; {open_ones} answers are unfinished")
            for fd, _ in ready:
                connection = self._connections[fd]
                if self._read(connection) and not self._next(connection):
                    poll.unregister(fd)
                    open_ones -= 1
        wall = time.perf_counter() - began
        return self._report(wall, _cpu() - used)

    def _next(self, connection: Connection) -> bool:
        request = next(self._requests, None)
        if request is not None:
            connection.send(request)
        return request is not None

    def _read(self, connection: Connection) -> bool:
        """Take what has come. True: that was the end of the answer."""
        buffer = self._buffer
        try:
            got = connection.receive_into(self._into)
        except ConnectionError as error:
            sys.exit(f"client: the server dropped the connection after {connection.events} events: {error}")
        end = TAIL + got
        if not connection.tail:
            self._check_start(bytes(buffer[TAIL:end]))
            connection.tail = bytes(TAIL)
        elif not got:
            sys.exit(f"client: the server closed the connection after {connection.events} events")
        buffer[:TAIL] = connection.tail
        # The kept tail is as long as the mark: from its second byte on, no mark is counted again.
        events = buffer.count(EVENT, TAIL - len(EVENT) + 1, end)
        if events:
            if not connection.events:
                connection.first = time.perf_counter()
            connection.events += events
        self.bytes += got
        self.reads += 1
        if not buffer.endswith(END, 0, end):
            connection.tail = buffer[end - TAIL : end]
            return False
        now = time.perf_counter()
        self.events += connection.events
        self.first_seconds.append(connection.first - connection.began)
        self.seconds.append(now - connection.began)
        return True

    @staticmethod
    def _check_start(start: bytes) -> None:
        if not start.startswith(b"HTTP/1.1 200"):
            sys.exit(f"client: refused: {start[:600]!r}")

    def _report(self, wall: float, cpu: float) -> dict[str, float]:
        return {
            "requests": len(self.seconds),
            "events": self.events,
            "bytes": self.bytes,
            "reads": self.reads,
            "wall_s": wall,
            "client_cpu_s": cpu,
            "first_event_p50_s": _quantile(self.first_seconds, 0.5),
            "first_event_p99_s": _quantile(self.first_seconds, 0.99),
            "answer_p50_s": _quantile(self.seconds, 0.5),
        }


def _poll() -> tuple[select.poll, float]:
    """A poll object and its timeout: epoll counts in seconds, poll in milliseconds; both know POLLIN."""
    if hasattr(select, "epoll"):
        return select.epoll(), LIMIT  # type: ignore[return-value]
    return select.poll(), LIMIT * 1000


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def requests(count: int, tokens: int, path: str) -> Iterator[bytes]:
    """``count`` streaming requests for ``tokens`` tokens each, ready to be sent."""
    for number in range(count):
        body = json.dumps({"prompt": f"{number} says", "max_tokens": tokens, "stream": True}).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        yield head.encode() + b"\r\n\r\n" + body


def drive(port: int, *, streams: int, count: int, tokens: int, path: str = "/v1/completions") -> dict[str, float]:
    """The same in a process of its own. RuntimeError: a request failed or an answer was not whole."""
    amount = ["--streams", str(streams), "--requests", str(count), "--tokens", str(tokens), "--path", path]
    ran = subprocess.run([sys.executable, __file__, str(port), *amount], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(ran.stderr.strip())
    seen: dict[str, float] = json.loads(ran.stdout)
    expected = count * (tokens + 2)  # one event a token, the closing event, [DONE]
    if seen["events"] != expected:
        raise RuntimeError(f"{seen['events']} events came, and {expected} should have")
    seen["tokens"] = count * tokens
    seen["tokens_per_s"] = count * tokens / seen["wall_s"]
    seen["client_cpu_share"] = seen["client_cpu_s"] / seen["wall_s"]
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--streams", type=int, default=32, help="connections, each with one request at a time")
    parser.add_argument("--requests", type=int, default=32, help="of all connections together")
    parser.add_argument("--tokens", type=int, default=1000, help="of each answer")
    parser.add_argument("--path", default="/v1/completions")
    options = parser.parse_args()
    load = Load(options.port, options.streams, requests(options.requests, options.tokens, options.path))
    print(json.dumps(load.run()))


if __name__ == "__main__":
    main()
