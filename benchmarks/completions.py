"""Completions from a model's server: closed-loop streams, each answer kept whole, with when it began and ended.

Unlike ``client.py`` it looks into the answers, after the last has come: a model gives some hundred tokens a second,
so that what a token costs the client does not matter here.
"""

from __future__ import annotations

import itertools
import json
import selectors
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import client
import peers


@dataclass(frozen=True)
class Ask:
    """A prompt, and how many tokens its answer shall have: exactly so many, since the model's own end is ignored."""

    prompt: str
    max_tokens: int

    def encode(self) -> bytes:
        """The whole HTTP request. Servers ignore the fields that they do not know."""
        body = {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        content = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content


@dataclass(frozen=True)
class Answer:
    """What its usage says, and when its first event and its end came, in seconds from the request."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_s: float
    seconds: float


class Exchange:
    """One request on a connection of its own, since not every server keeps one open after a streamed answer."""

    def __init__(self, port: int, ask: Ask) -> None:
        self.ask = ask
        self.received = bytearray()
        self.began, self.first, self.ended = time.perf_counter(), 0.0, 0.0
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=peers.LIMIT)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.sendall(ask.encode())

    def read(self) -> bool:
        """Take what has come. True: that was the answer's end. RuntimeError: it was refused or cut off."""
        got = self.sock.recv(1 << 16)
        seen = self.received
        seen += got
        if not got or not seen.startswith(b"HTTP/1.1 200"[: len(seen)]):
            raise RuntimeError(f"the server refused or cut off a request: {bytes(seen[-600:])!r}")
        if not self.first and b"data: " in seen:
            self.first = time.perf_counter()
        if not seen.endswith(client.END):
            return False
        self.ended = time.perf_counter()
        return True

    def answer(self) -> Answer:
        """RuntimeError: it failed, or has another length than was asked for."""
        usage = next((event["usage"] for event in _events(self.received) if event.get("usage")), None)
        if usage is None or usage["completion_tokens"] != self.ask.max_tokens:
            raise RuntimeError(f"{self.ask.max_tokens} tokens were asked for: {bytes(self.received[-600:])!r}")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return Answer(
            usage["prompt_tokens"], cached, usage["completion_tokens"], self.first - self.began, self.ended - self.began
        )


def complete(port: int, asks: Iterable[Ask], *, streams: int) -> tuple[list[Answer], float]:
    """All answers, in the order in which they ended, and the seconds from the first request to the last end.

    RuntimeError: an answer failed, or has another length than was asked for.
    """
    waiting = iter(asks)
    done: list[Exchange] = []
    with selectors.DefaultSelector() as selector:

        def begin(ask: Ask) -> None:
            exchange = Exchange(port, ask)
            selector.register(exchange.sock, selectors.EVENT_READ, exchange)

        began = time.perf_counter()
        for ask in itertools.islice(waiting, streams):
            begin(ask)
        while selector.get_map():
            ready = selector.select(peers.LIMIT)
            if not ready:
                raise RuntimeError(f"nothing came for {peers.LIMIT:g} s")
            for key, _ in ready:
                if key.data.read():
                    selector.unregister(key.fileobj)
                    key.data.sock.close()
                    done.append(key.data)
                    for following in itertools.islice(waiting, 1):
                        begin(following)
    return [exchange.answer() for exchange in done], done[-1].ended - began


def _events(received: bytearray) -> Iterator[dict[str, Any]]:
    """The JSON of every event of a chunked answer. RuntimeError for one that is an error."""
    body = b"".join(_chunks(bytes(received[received.index(b"\r\n\r\n") + 4 :])))
    for line in body.splitlines():
        if line.startswith(b"data: {"):
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise RuntimeError(f"an answer failed: {event['error']}")
            yield event


def _chunks(body: bytes) -> Iterator[bytes]:
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        yield rest[:length]
        body = rest[length + 2 :]
