"""Starting the servers that are measured, each in a process and a directory of its own, and looking at their CPU time."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LIMIT = 60.0
"""Seconds for a server to start; a model may have to be loaded."""
_SLIMPROC_PORT = re.compile(r"url=http://127\.0\.0\.1:(\d+)")
_OWN_PORT = re.compile(r"^(\d+)$", re.MULTILINE)

SLIM_SERVE_MISSING = (
    "slim-serve is not installed, so its side is left out. To get it: python3 -m venv /tmp/slim-serve && "
    "/tmp/slim-serve/bin/pip install slim-serve, and then --slim-serve /tmp/slim-serve/bin/slim-serve"
)


def wait_until(condition: Callable[[], Any], what: str, limit: float = LIMIT, every: float = 0.01) -> Any:
    """The first true value of ``condition``. RuntimeError naming ``what`` when there is none in time."""
    deadline = time.monotonic() + limit
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {limit:g} s: {what}")
        time.sleep(every)
    return value


def status(port: int, path: str, body: bytes) -> int:
    """Of the answer to a POST."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)
    with contextlib.closing(connection):
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        return connection.getresponse().status


def lives(process: psutil.Process) -> bool:
    """A zombie does not, whenever whoever inherited it reaps it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


_AS_INSTALLED = {"PYTHONDONTWRITEBYTECODE": ""}
"""Whoever has that set would have every server compile slimproc anew, which an installed one never does."""


class Server:
    """A process that serves on a port which its log names, or which was chosen for it."""

    def __init__(self, name: str, command: list[str], *, port: re.Pattern[str] | int, **environ: str) -> None:
        self.name = name
        self.directory = Path(tempfile.mkdtemp(prefix=f"bench-{name}-"))
        self._log_path = self.directory / "log"
        package = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        with self._log_path.open("w") as log:
            self.process = subprocess.Popen(
                [part.format(directory=self.directory) for part in command],
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env={**os.environ, **_AS_INSTALLED, "PYTHONPATH": package, **environ},
            )
        try:
            self.port = port if isinstance(port, int) else int(wait_until(lambda: self._find(port), f"{name} listens"))
        except BaseException:
            self.close()
            raise

    def _find(self, pattern: re.Pattern[str]) -> str | None:
        self.check()
        found = pattern.search(self.log)
        return found and found[1]

    def check(self) -> None:
        """RuntimeError when it is no more."""
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.name} ended with {self.process.returncode}: {self.log[-2000:]}")

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    readiness = "/readyz"

    def ready(self) -> bool:
        """The path ``readiness`` answers 200."""
        self.check()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", self.readiness)
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def processes(self) -> dict[str, int]:
        """Pids by what they do."""
        return {"server": self.process.pid}

    def cpu(self) -> dict[str, float]:
        """CPU seconds that each process has used so far."""
        return {name: _cpu_seconds(pid) for name, pid in self.processes().items()}

    def close(self) -> None:
        """Stop it, by force if it must be, and forget its directory."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


def _cpu_seconds(pid: int) -> float:
    """Of all its threads. Linux counts nanoseconds per thread; elsewhere it is what psutil says (ticks of 10 ms)."""
    threads = list(Path(f"/proc/{pid}/task").glob("*/schedstat"))
    if threads:
        return sum(map(_nanoseconds, threads)) / 1e9
    return float(sum(psutil.Process(pid).cpu_times()[:2]))


def _nanoseconds(thread: Path) -> int:
    """0 of one that has ended since it was listed."""
    with contextlib.suppress(OSError):
        return int(thread.read_text().split()[0])
    return 0


class Slimproc(Server):
    """``slimproc serve``, whose engines can be asked for over its admin socket. With a ``port``, it is not waited for."""

    def __init__(self, *arguments: str, port: int = 0, **environ: str) -> None:
        command = [sys.executable, "-m", "slimproc", "serve", "--port", str(port)]
        command += ["--admin-socket", "{directory}/admin.sock", *arguments]
        super().__init__("slimproc", command, port=port or _SLIMPROC_PORT, **environ)

    def processes(self) -> dict[str, int]:
        return {"front": self.process.pid, "engine": self.replica()["pid"]}

    def replica(self) -> dict[str, Any]:
        """The first of /admin/replicas."""
        found: dict[str, Any] = self.admin("GET", "/admin/replicas")["replicas"][0]
        return found

    def admin(self, method: str, path: str) -> Any:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(LIMIT)
            sock.connect(str(self.directory / "admin.sock"))
            connection = http.client.HTTPConnection("admin")
            connection.sock = sock
            connection.request(method, path)
            return json.loads(connection.getresponse().read())


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    """``server``, ready; stopped at the end of the block."""
    try:
        if not isinstance(server, OwnScript):
            wait_until(server.ready, f"{server.name} is ready")
        yield server
    finally:
        server.close()


class OwnScript(Server):
    """A server of this directory; it is ready as soon as it says where it listens."""

    def __init__(self, script: str, *arguments: object) -> None:
        port = _SLIMPROC_PORT if script == "dataplane.py" else _OWN_PORT
        super().__init__(script, [sys.executable, str(HERE / script), *map(str, arguments)], port=port)


def free_port() -> int:
    """One that nobody listened on a moment ago, for a server that cannot choose its own."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


def slim_serve(executable: Path, *, max_tokens: int) -> Server:
    """The peer with its fake engine, as its documentation starts it; ``max_tokens`` is the longest answer it allows."""
    port = free_port()
    return Server(
        "slim-serve",
        [str(executable), "serve"],
        port=port,
        SLM_ENGINE="fake",
        SLM_PORT=str(port),
        SLM_MAX_QUEUE_SIZE="2000",
        SLM_LOG_LEVEL="WARNING",
        SLM_MAX_TOKENS_LIMIT=str(max_tokens),
    )


def find_slim_serve(given: str | None) -> Path | None:
    """The executable: a path, or the directory of a virtual environment; by default what PATH has. ``none``: none."""
    if given == "none":
        return None
    if given is None:
        found = shutil.which("slim-serve")
        return Path(found) if found else None
    path = Path(given).expanduser().absolute()
    path = path / "bin" / "slim-serve" if path.is_dir() else path
    if not path.exists():
        raise SystemExit(f"--slim-serve: there is no {path}")
    return path


def slim_serve_version(executable: Path) -> str:
    python = executable.parent / "python"
    code = "import importlib.metadata as m; print(m.version('slim-serve'))"
    asked = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"
