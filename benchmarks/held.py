"""Streams that are held open by one process: opened in parts, read for a time, and left without their end."""

from __future__ import annotations

import json
import resource
import selectors
import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import client
import peers

_KEPT = len(client.EVENT) - 1
"""Bytes kept of each read: a mark that is cut in two is found, and none is counted twice."""
_READ = 1 << 18
_ACCEPT = 1e-3
"""Seconds that a connection may take to be accepted, one after the other, by a server that has nothing else to do."""
_TOGETHER = 32
"""Requests that are sent before what has come meanwhile is read."""


def raise_open_files(streams: int) -> None:
    """So many connections in this process, and in the servers that it starts. RuntimeError: the system allows less."""
    needed = streams + 512
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise RuntimeError(f"{needed} open files are needed and {hard} allowed: raise the limit (ulimit -Hn)")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def request(prompt: str) -> bytes:
    """For a stream that does not end by itself within a measurement."""
    body = json.dumps({"prompt": prompt, "max_tokens": 900_000, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


class _Stream:
    def __init__(self, port: int) -> None:
        self.events = 0
        self._tail = b""
        self._begun = False
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=peers.LIMIT)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(self) -> int:
        """The number of events that have come. RuntimeError: it was refused or has ended."""
        got = self.sock.recv(_READ)
        if not got or not (self._begun or got.startswith(b"HTTP/1.1 200")):
            raise RuntimeError(
                f"a stream was refused or ended after {self.events} events: {(self._tail + got)[-600:]!r}"
            )
        self._begun = True
        seen = self._tail + got
        self._tail = seen[-_KEPT:]
        events = seen.count(client.EVENT)
        self.events += events
        return events


class Held:
    """All of them. Left as a context, they are closed as a client does that goes away."""

    def __init__(self, port: int, prompt: Callable[[int], str]) -> None:
        """``prompt`` gives a stream's by its number, from 0."""
        self._port = port
        self._prompt = prompt
        self._selector = selectors.DefaultSelector()
        self._streams: list[_Stream] = []
        self._events = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._selector.close()
        for stream in self._streams:
            stream.sock.close()

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, count: int) -> None:
        """So many more; each has its first event when this returns. RuntimeError: one was refused, or none came.

        All connect before any asks, and the server has a moment to accept them: one that is busy with streams does so
        once in a turn of its loop, and this is not what is measured.
        """
        fresh = [_Stream(self._port) for _ in range(count)]
        time.sleep(count * _ACCEPT)
        for number, stream in enumerate(fresh):
            self._selector.register(stream.sock, selectors.EVENT_READ, stream)
            stream.sock.sendall(request(self._prompt(len(self._streams))))
            self._streams.append(stream)
            if number % _TOGETHER == _TOGETHER - 1:
                self._take(0)
        while not all(stream.events for stream in fresh):
            if not self._take(peers.LIMIT):
                raise RuntimeError(
                    f"{sum(not stream.events for stream in fresh)} streams had no event in {peers.LIMIT:g} s"
                )

    def run(self, seconds: float) -> int:
        """Read what comes in the next seconds; how many events that was. RuntimeError: a stream ended."""
        before, end = self._events, time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            self._take(left)
        return self._events - before

    def _take(self, wait: float) -> bool:
        ready = self._selector.select(wait)
        for key, _ in ready:
            self._events += key.data.read()
        return bool(ready)
