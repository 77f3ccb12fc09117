"""Closed-loop requests over connections that stay open; each answer is timed and checked to be whole, and not parsed.

For answers that are short, streamed or not, where what each one took is wanted; ``client.py`` counts long streams, and
``completions.py`` looks into a model's answers.
"""

from __future__ import annotations

import itertools
import json
import re
import selectors
import socket
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass

import client
import peers

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


def requests(count: int, *, tokens: int, stream: bool) -> Iterable[bytes]:
    """For completions of ``tokens`` tokens each. Every prompt begins with its own number."""
    for number in range(count):
        body = json.dumps({"prompt": f"{number} says", "max_tokens": tokens, "stream": stream}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        yield head.encode() + body


@dataclass(frozen=True)
class Answer:
    """``place`` is the connection, from 0; ``turn`` which of its answers this is, from 0."""

    place: int
    turn: int
    first_s: float
    """From the request to the first event; of an answer that is not streamed, to its end."""
    seconds: float
    bytes: int
    """The whole answer, with its head."""
    events: int


@dataclass(frozen=True)
class Loop:
    answers: list[Answer]
    """In the order in which they ended."""
    wall_s: float
    client_cpu_s: float

    @property
    def per_s(self) -> float:
        return len(self.answers) / self.wall_s

    def quantile_ms(self, share: float) -> float:
        """Of the answers' times."""
        return client._quantile([answer.seconds for answer in self.answers], share) * 1000

    def steady(self) -> list[Answer]:
        """Without each connection's first answer, for which nobody had to wait as later ones do, and without those at
        the end, when fewer connections have something to ask.
        """
        places = {answer.place for answer in self.answers}
        whole = min(max(one.turn for one in self.answers if one.place == place) for place in places)
        return [answer for answer in self.answers if 0 < answer.turn <= whole]

    @property
    def mean_steady_s(self) -> float:
        return statistics.fmean(answer.seconds for answer in self.steady())


class _Connection:
    def __init__(self, port: int, place: int) -> None:
        self.place = place
        self.turn = -1
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=peers.LIMIT)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, request: bytes) -> None:
        self.turn += 1
        self._seen = bytearray()
        self._end: int | None = None
        """Where the answer ends, once its head has said so; -1: where its last chunk is."""
        self._began, self._first = time.perf_counter(), 0.0
        self.sock.sendall(request)

    def read(self) -> Answer | None:
        """Take what has come. The answer, if that was its end. RuntimeError: it was refused or cut off."""
        got = self.sock.recv(1 << 16)
        seen = self._seen
        seen += got
        if not got or not seen.startswith(b"HTTP/1.1 200"[: len(seen)]):
            raise RuntimeError(f"the server refused or cut off a request: {bytes(seen[-600:])!r}")
        if self._end is None:
            head = seen.find(b"\r\n\r\n")
            if head < 0:
                return None
            length = _LENGTH.search(seen, 0, head)
            self._end = head + 4 + int(length[1]) if length else -1
        if not self._first and self._end < 0 and client.EVENT in seen:
            self._first = time.perf_counter()
        if not (seen.endswith(client.END) if self._end < 0 else len(seen) >= self._end):
            return None
        now = time.perf_counter()
        events = seen.count(client.EVENT) if self._end < 0 else 0
        first = (self._first or now) - self._began
        return Answer(self.place, self.turn, first, now - self._began, len(seen), events)


def drive(port: int, asks: Iterable[bytes], *, streams: int) -> Loop:
    """All of them, ``streams`` at a time. RuntimeError: one was refused, failed or cut off."""
    waiting = iter(asks)
    done: list[Answer] = []
    connections = [_Connection(port, place) for place in range(streams)]
    try:
        with selectors.DefaultSelector() as selector:
            began, used = time.perf_counter(), client._cpu()
            for connection, ask in zip(connections, itertools.islice(waiting, streams), strict=False):
                selector.register(connection.sock, selectors.EVENT_READ, connection)
                connection.send(ask)
            while selector.get_map():
                ready = selector.select(peers.LIMIT)
                if not ready:
                    raise RuntimeError(f"nothing came for {peers.LIMIT:g} s")
                for key, _ in ready:
                    answer = key.data.read()
                    if answer is None:
                        continue
                    done.append(answer)
                    following = next(waiting, None)
                    if following is None:
                        selector.unregister(key.fileobj)
                    else:
                        key.data.send(following)
            return Loop(done, time.perf_counter() - began, client._cpu() - used)
    finally:
        for connection in connections:
            connection.sock.close()


def check_events(loop: Loop, tokens: int) -> None:
    """RuntimeError unless every streamed answer had an event a token, or at least its tokens and an end."""
    short = [answer.events for answer in loop.answers if answer.events < tokens + 1]
    if short:
        raise RuntimeError(f"answers of {tokens} tokens had only {min(short)} events")
