import signal
import socketserver
import sys
import threading
import types
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from slimproc import cli


class Result:
    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, home and runtime directory, and no settings in the environment."""
    work = tmp_path / "w"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "r"))
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("RUNTIME_DIRECTORY", "STATE_DIRECTORY", "XDG_STATE_HOME", "SLIMPROC_CREDIT"):
        monkeypatch.delenv(name, raising=False)
    return work


@pytest.fixture
def slimproc(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run the command line in this process."""

    def run(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["slimproc", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return Result(ended.value.code or 0, captured.out, captured.err)

    return run


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """In the place of slimproc.server: ``configs`` gets what it was to run; ``end`` says how that went."""
    module = types.ModuleType("slimproc.server")
    module.configs = []
    module.end = lambda: 0

    def run(config: object, *, read: Callable[[], object]) -> int:
        module.configs.append(config)
        module.read = read
        return module.end()

    module.run = run
    monkeypatch.setitem(sys.modules, "slimproc.server", module)
    yield module
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # which a real server does


@pytest.fixture
def admin(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Start an HTTP server on a unix socket that gives one answer to everything."""
    servers = []

    def start(path: Path, body: bytes, status: int = 200) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status if self.path == "/admin/replicas" else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def address_string(self) -> str:
                return "unix"

            def log_message(self, *arguments: object) -> None:
                pass

        path.parent.mkdir(parents=True, exist_ok=True)
        server = socketserver.ThreadingUnixStreamServer(str(path), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join(10)
        server.server_close()
