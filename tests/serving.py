"""A real server in its own process, for tests that talk to it as its users do."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import psutil
import yaml

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

LIMIT = float(os.environ.get("TEST_LIMIT", "30"))
"""Seconds that any one condition may take on a machine that is busy with something else. Tests that are expected to fail
are run with less.
"""


def wait_until(condition: Callable[[], Any], what: str, limit: float = LIMIT) -> Any:
    """The first true value of ``condition``; an assertion that names ``what`` when there is none in time."""
    deadline = time.monotonic() + limit
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {limit:g} s: {what}"
        time.sleep(0.01)


class Answer:
    """A whole HTTP answer."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def text(self) -> str:
        """The first choice's text, of either route."""
        choice = self.json["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]


class EventReader:
    """A streamed answer, event by event."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self.connection = connection
        self.response = response
        self.status = response.status
        self.headers = response.headers

    def lines(self) -> Iterator[bytes]:
        while line := self.response.readline():
            yield line.rstrip(b"\r\n")

    def events(self) -> Iterator[Any]:
        """The data of each event, as JSON; ``"[DONE]"`` as it is."""
        for line in self.lines():
            if line.startswith(b"data: "):
                data = line[6:]
                yield "[DONE]" if data == b"[DONE]" else json.loads(data)

    def take(self, count: int) -> list[Any]:
        """The next ``count`` events."""
        return list(itertools.islice(self.events(), count))

    def close(self) -> None:
        """Leave at once, whatever is still coming."""
        with contextlib.suppress(OSError):
            if self.connection.sock is not None:
                self.connection.sock.shutdown(socket.SHUT_RDWR)
        self.response.close()
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pending:
    """A request that has been sent and whose answer nobody has waited for yet."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self.connection = connection

    @property
    def sock(self) -> socket.socket:
        return self.connection.sock

    def answer(self) -> Answer:
        """Wait for the whole answer, and close."""
        try:
            return Answer(self.connection.getresponse())
        finally:
            self.connection.close()

    def events(self) -> EventReader:
        return EventReader(self.connection, self.connection.getresponse())

    def reset(self) -> None:
        """Leave with a RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def close(self) -> None:
        self.connection.close()


class ServerProcess:
    """``slimproc serve`` with a configuration of the test's own, on a free port.

    ``wrapper``: a command that runs the server (``strace -f``). ``environ``: variables beside our own.
    """

    def __init__(
        self,
        directory: Path,
        config: dict[str, Any],
        *,
        arguments: tuple[str, ...] = (),
        wrapper: tuple[str, ...] = (),
        **environ: str,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._connections: list[http.client.HTTPConnection] = []
        self.admin_socket = Path(config.get("admin_socket", directory / "admin.sock"))
        full = {"listen": "127.0.0.1:0", "admin_socket": str(self.admin_socket), "state_dir": str(directory / "state")}
        file = directory / "slimproc.yaml"
        file.write_text(yaml.safe_dump(full | config, sort_keys=False))
        self.log_path = directory / "log"
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [*wrapper, sys.executable, "-m", "slimproc", "serve", "--config", str(file), *arguments],
                stdout=log,
                stderr=log,
                cwd=directory,
                env=os.environ | environ,
            )
        try:
            self.port: int = int(wait_until(self._port, f"the server listens; its log says: {self.log}"))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _port(self) -> str | None:
        assert self.process.poll() is None, f"the server ended with {self.process.returncode}: {self.log}"
        found = re.search(r"url(?:=|\":\")http://127\.0\.0\.1:(\d+)", self.log)
        return found and found[1]

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def records(self, message: str, **fields: Any) -> list[dict[str, Any]]:
        """The log lines with this message and these fields, of a server with ``log_json``."""
        lines = [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]
        return [line for line in lines if line["message"] == message and fields.items() <= line.items()]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # --- talking to it ------------------------------------------------------------------------------------------------

    def connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)
        self._connections.append(connection)
        return connection

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, None, headers)

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        """``body`` as it is when it is bytes, else as JSON."""
        return self.request("POST", path, body, headers)

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        connection = self.connect()
        try:
            connection.request(method, path, _encoded(body), _headers(headers or {}))
            return Answer(connection.getresponse())
        finally:
            connection.close()

    def complete(self, prompt: Any, **fields: Any) -> Answer:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def chat(self, content: Any, **fields: Any) -> Answer:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})

    def begin(
        self, prompt: Any, *, path: str = COMPLETIONS, headers: dict[str, str] | None = None, **fields: Any
    ) -> Pending:
        """Send a request and wait for nothing. ``prompt``: of a chat, the user's one message."""
        body = {"prompt": prompt} if path == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
        connection = self.connect()
        connection.request("POST", path, _encoded(body | fields), _headers(headers or {}))
        return Pending(connection)

    def stream(self, prompt: Any, **fields: Any) -> EventReader:
        """A streamed answer, once its headers have come."""
        return self.begin(prompt, **{"stream": True, **fields}).events()

    def raw(self, data: bytes) -> socket.socket:
        """A plain connection on which ``data`` has been sent."""
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT)
        sock.sendall(data)
        return sock

    def admin(self, path: str, method: str = "GET") -> Any:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(LIMIT)
            sock.connect(str(self.admin_socket))
            connection = http.client.HTTPConnection("admin")
            connection.sock = sock
            connection.request(method, path)
            return json.loads(connection.getresponse().read())

    # --- looking at it ------------------------------------------------------------------------------------------------

    def replicas(self) -> list[dict[str, Any]]:
        return self.admin("/admin/replicas")["replicas"]

    def replica(self, index: int = 0) -> dict[str, Any]:
        return self.replicas()[index]

    def wait_ready(self) -> ServerProcess:
        """Until every model is ready, with all of its replicas that have been started."""
        wait_until(lambda: self.get("/readyz").status == 200, f"every model is ready; the log says: {self.log}")
        wait_until(lambda: all(one["state"] != "starting" for one in self.replicas()), "no replica loads any more")
        return self

    def wait_sequences(self, *counts: int) -> None:
        """Until each replica has so many sequences in its engine."""
        wait_until(lambda: [one["sequences"] for one in self.replicas()] == list(counts), f"{counts} sequences run")

    def wait_queued(self, count: int, model: str = "fake") -> None:
        """Until so many requests wait for a slot."""
        self.wait_metric(count, "queue_depth", model=model)

    def wait_idle(self) -> None:
        """Until no sequence is in any engine and no request waits for a slot."""
        wait_until(lambda: not any(one["sequences"] for one in self.replicas()), "no sequence runs")
        wait_until(lambda: not any(one["queue_depth"] for one in self.admin("/admin/models")["models"]), "none waits")

    def children(self) -> list[psutil.Process]:
        """Every process that the server has started and that still lives."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def metric(self, name: str, **labels: str) -> float:
        """One sample of /metrics; ``name`` without the prefix."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        for line in self.get("/metrics").body.decode().splitlines():
            found = re.fullmatch(rf"slimproc_{name}(?:\{{(.*)\}})? (\S+)", line)
            if found and wanted <= set((found[1] or "").split(",")):
                return float(found[2])
        raise AssertionError(f"no sample {name} with {labels}")

    def wait_metric(self, value: float, name: str, **labels: str) -> None:
        wait_until(lambda: self.metric(name, **labels) == value, f"{name} {labels} is {value}")

    # --- its end --------------------------------------------------------------------------------------------------------

    def kill_engine(self, index: int = 0, number: int = signal.SIGKILL) -> int:
        """Send a signal to an engine; the pid that it had."""
        pid = self.replica(index)["pid"]
        os.kill(pid, number)
        return int(pid)

    def stop(self, number: int = signal.SIGTERM, limit: float = LIMIT) -> int:
        """Ask it to stop; its exit status."""
        self.process.send_signal(number)
        return self.process.wait(limit)

    def hang_up(self) -> None:
        """Close every connection of the test's."""
        for connection in self._connections:
            connection.close()

    def close(self) -> None:
        """Whatever state the test left it in."""
        self.hang_up()
        if self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop(limit=15)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def _encoded(body: Any) -> bytes | None:
    return body if body is None or isinstance(body, bytes) else json.dumps(body).encode()


def _headers(headers: dict[str, str]) -> dict[str, str]:
    return {"Content-Type": "application/json"} | {key.replace("_", "-"): value for key, value in headers.items()}


def fake(**settings: Any) -> dict[str, Any]:
    """A configuration with one fake model; keywords that are the fake's own go into its block."""
    block = {key: settings.pop(key) for key in list(settings) if key in _FAKE_KEYS}
    return {"models": {"fake": {"backend": "fake", "fake": block, **settings}}}


_FAKE_KEYS = frozenset(
    {
        "ttft",
        "token_latency",
        "load_time",
        "load_error",
        "die_in_load",
        "ignore_sigterm",
        "hang_in_unload",
        "unload_time",
    }
)


def script(**fields: Any) -> str:
    """A prompt that scripts the fake backend."""
    return "!fake " + json.dumps(fields)
