"""Pass-through: what ``/infer`` adds to a short answer, and how fast it moves a long body, beside nginx's proxy.

python benchmarks/passing.py [--runs 5] [--quick]
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peers
from command import main
from scenario import Comparison, Options, Scenario, interleave

ADDED_LIMIT_MS = 1.0
HALF = 0.5
LONG_BODY = 256 << 20
REQUESTS = 2000
NGINX_MISSING = (
    "nginx is not installed, so its side is left out. To get it: apt-get install --no-install-recommends nginx-light"
)
_NGINX = """
worker_processes 1; daemon off; pid {directory}/pid; error_log stderr;
events {{ worker_connections 64; }}
http {{
  access_log off; client_max_body_size 0; keepalive_requests 1000000; client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy;
  fastcgi_temp_path {directory}/f; uwsgi_temp_path {directory}/u; scgi_temp_path {directory}/s;
  upstream sink {{ server 127.0.0.1:{sink}; keepalive 4; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://sink; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_request_buffering off; proxy_buffering off;
    }}
  }}
}}
"""


class Connection:
    """A raw client that keeps its connection."""

    def __init__(self, port: int, path: str) -> None:
        self._path = path
        self._sock = socket.create_connection(("127.0.0.1", port), timeout=peers.LIMIT)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post(self, length: int) -> float:
        """Seconds until the whole answer has come. RuntimeError unless it is a 200."""
        head = f"POST {self._path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\nContent-Length: {length}"
        piece = bytes(min(length, 1 << 18))
        began = time.perf_counter()
        self._sock.sendall(head.encode() + b"\r\n\r\n")
        for _ in range(length // max(1, len(piece))):
            self._sock.sendall(piece)
        seen = b""
        while len(seen) < 1024 or not seen.endswith(b"x" * 1024):
            got = self._sock.recv(1 << 16)
            seen += got
            if not got or not seen.startswith(b"HTTP/1.1 200"[: len(seen)]):
                raise RuntimeError(f"the answer was {seen[:300]!r}")
        return time.perf_counter() - began

    def close(self) -> None:
        self._sock.close()


@contextlib.contextmanager
def slimproc(sink: int) -> Iterator[tuple[int, str]]:
    """Its port and path, with the sink as a model that is simply there."""
    remote = {"base_url": f"http://127.0.0.1:{sink}", "contract": "none", "health_path": "/"}
    model = {"remote": remote, "inference_path": "/", "max_body": "1GiB", "concurrency": 4}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump({"log_level": "warning", "models": {"sink": model}}, file)
        file.flush()
        port = peers.free_port()
        server = peers.Slimproc("--config", file.name, port=port)
        with peers.running(server):
            yield port, "/infer?model=sink"


@contextlib.contextmanager
def nginx(sink: int) -> Iterator[tuple[int, str]]:
    port = peers.free_port()
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "nginx.conf"
        config.write_text(_NGINX.format(directory=directory, sink=sink, port=port))
        server = peers.Server("nginx", ["nginx", "-c", str(config), "-p", directory], port=port)
        server.readiness = "/"
        with peers.running(server):
            yield port, "/"


@contextlib.contextmanager
def direct(sink: int) -> Iterator[tuple[int, str]]:
    yield sink, "/"


SIDES = {"slimproc": slimproc, "nginx": nginx, "direct": direct}


def one_side(name: str, options: Options) -> dict[str, Any]:
    requests, length = (50, 1 << 24) if options.quick else (REQUESTS, LONG_BODY)
    with peers.running(peers.OwnScript("sink.py")) as sink, SIDES[name](sink.port) as (port, path):
        connection = Connection(port, path)
        for _ in range(20):
            connection.post(100)
        short = [connection.post(1000) * 1000 for _ in range(requests)]
        long = min(connection.post(length) for _ in range(3))
        connection.close()
    return {"short_ms": statistics.median(short), "long_mib_per_s": length / long / (1 << 20)}


def measure(options: Options) -> list[Comparison]:
    names = [name for name in SIDES if name != "nginx" or shutil.which("nginx")]
    if "nginx" not in names:
        print(NGINX_MISSING, file=sys.stderr)
    seen = interleave({name: lambda name=name: one_side(name, options) for name in names}, options.runs)
    runs = [run for side in seen.values() for run in side]
    added = [ours["short_ms"] - bare["short_ms"] for ours, bare in zip(seen["slimproc"], seen["direct"], strict=True)]
    speeds = {name: [run["long_mib_per_s"] for run in seen[name]] for name in names if name != "direct"}
    bare = statistics.median(run["long_mib_per_s"] for run in seen["direct"])
    return [
        Comparison(
            "1 kB there and back: what /infer adds (median)", "ms", {"slimproc": added}, ADDED_LIMIT_MS, True, "", runs
        ),
        Comparison("a body of 256 MiB", "MiB/s", speeds, HALF, False, f"without any proxy: {bare:,.0f} MiB/s"),
    ]


SCENARIOS = [
    Scenario(
        "pass-through",
        "S15",
        "/infer in front of a server that is simply there: a short request, and a long body, beside nginx's proxy",
        "one client on one connection. 1 kB up and 1 kB back: the median through /infer less the median without a proxy. "
        "256 MiB up: MiB/s, the best of three in a run, through /infer and through nginx with one worker and without "
        "buffering of requests (proxy_request_buffering off), to the same server.",
        "several clients; TLS; a network.",
        measure,
    )
]

if __name__ == "__main__":
    sys.exit(main(SCENARIOS, __doc__ or ""))
