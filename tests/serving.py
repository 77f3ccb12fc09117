"""A real server in its own process, for tests that talk to it as its users do."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

LIMIT = 30.0
"""Seconds that any one condition may take on a machine that is busy with something else."""


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

    def close(self) -> None:
        """Leave at once, whatever is still coming."""
        with contextlib.suppress(OSError):
            self.connection.sock.shutdown(socket.SHUT_RDWR)
        self.response.close()
        self.connection.close()


class ServerProcess:
    """``slimproc serve`` with a configuration of the test's own, on a free port."""

    def __init__(self, directory: Path, config: dict[str, Any], *, arguments: tuple[str, ...] = (), **environ: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.admin_socket = directory / "admin.sock"
        full = {"listen": "127.0.0.1:0", "admin_socket": str(self.admin_socket), "state_dir": str(directory / "state")}
        file = directory / "slimproc.yaml"
        file.write_text(yaml.safe_dump(full | config, sort_keys=False))
        self.log_path = directory / "log"
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "slimproc", "serve", "--config", str(file), *arguments],
                stdout=log,
                stderr=log,
                cwd=directory,
                env=os.environ | environ,
            )
        self.port: int = int(wait_until(self._port, f"the server listens; its log says: {self.log}"))

    def _port(self) -> str | None:
        assert self.process.poll() is None, f"the server ended with {self.process.returncode}: {self.log}"
        found = re.search(r"url=http://127\.0\.0\.1:(\d+)", self.log)
        return found and found[1]

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # --- talking to it ------------------------------------------------------------------------------------------------

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)

    def get(self, path: str, **headers: str) -> Answer:
        return self._request("GET", path, None, headers)

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        """``body`` as it is when it is bytes, else as JSON."""
        return self._request("POST", path, body, headers)

    def _request(self, method: str, path: str, body: Any, headers: dict[str, str]) -> Answer:
        connection = self.connect()
        try:
            connection.request(method, path, _encoded(body), _headers(headers))
            return Answer(connection.getresponse())
        finally:
            connection.close()

    def complete(self, prompt: Any, **fields: Any) -> Answer:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def chat(self, content: Any, **fields: Any) -> Answer:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})

    def stream(self, prompt: Any, *, path: str = "/v1/completions", **fields: Any) -> EventReader:
        body = {"prompt": prompt} if path == "/v1/completions" else {"messages": [{"role": "user", "content": prompt}]}
        connection = self.connect()
        connection.request("POST", path, _encoded({**body, "stream": True, **fields}), _headers({}))
        return EventReader(connection, connection.getresponse())

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
        wait_until(lambda: self.get("/readyz").status == 200, f"every model is ready; the log says: {self.log}")
        return self

    def wait_idle(self) -> None:
        """Until no sequence is in any engine and none waits."""
        wait_until(lambda: not any(replica["sequences"] for replica in self.replicas()), "no sequence runs")

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

    def close(self) -> None:
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
    {"ttft", "token_latency", "load_time", "load_error", "die_in_load", "ignore_sigterm", "hang_in_unload", "unload_time"}
)


def script(**fields: Any) -> str:
    """A prompt that scripts the fake backend."""
    return "!fake " + json.dumps(fields)
