"""Asks a running server over its admin socket, and finds that socket."""

from __future__ import annotations

import http.client
import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import quote

import msgspec

from slimproc.cli.configuration import read_or_exit, typed_path
from slimproc.config import Config, default_file
from slimproc.errors import ServiceUnavailable

_TIMEOUT = 5.0
"""Seconds: the front answers from memory, so that anything longer means that it hangs."""
_SYSTEM_SOCKET = Path("/run/slimproc/admin.sock")
"""Where the systemd unit of the system's own slimproc puts it."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, limit: float) -> None:
        super().__init__("localhost", timeout=limit)
        self.path = path

    def connect(self) -> None:
        self.sock = _connected(self.path)


def get(path: Path, route: str) -> bytes:
    """The body of a 200 answer. Raises ServiceUnavailable, in one line, for anything else."""
    status, body = ask(path, "GET", route)
    if status != 200:
        raise ServiceUnavailable(f"the server at {path} answers {status} to GET {route}: {_message(body)}")
    return body


def ask(path: Path, method: str, route: str, limit: float = _TIMEOUT) -> tuple[int, bytes]:
    """Status and body of an answer that comes within ``limit`` seconds. Raises ServiceUnavailable where none comes."""
    connection = _UnixConnection(path, limit)
    try:
        connection.request(method, route)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except TimeoutError:
        raise ServiceUnavailable(f"the server at {path} does not answer within {limit:g} seconds") from None
    except OSError as error:
        raise ServiceUnavailable(f"no server answers at {path}: {error.strerror or error}") from None
    except http.client.HTTPException as error:
        raise ServiceUnavailable(f"what answers at {path} speaks no HTTP ({type(error).__name__})") from None
    finally:
        connection.close()


def in_route(model: str) -> str:
    """A model's name as one part of a route; what is no text in it goes as the bytes that were typed."""
    return quote(model, safe="", errors="surrogateescape")


def _message(body: bytes) -> str:
    """What an error's body says, in one line."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError, UnicodeDecodeError, RecursionError):
        return "it does not say why"


def find_socket(flags: Mapping[str, object]) -> Path:
    """The socket that ``admin_socket``, ``port`` or the configuration name; without them, that of the only server.

    Raises ServiceUnavailable where none or several are there to be asked.
    """
    if flags.get("admin_socket") is not None:
        return typed_path(str(flags["admin_socket"]))
    config = _config(flags)
    port = config.listen.port
    expected = config.admin_socket_for(port)
    if flags.get("port") is not None or config.admin_socket is not None or (port and answers(expected)):
        return expected
    others = [path for path in _others(config) if answers(path)]
    if len(others) > 1:
        raise ServiceUnavailable(
            f"several servers run here: say which by --admin-socket ({', '.join(map(str, others))})"
        )
    return others[0] if others else expected


def _config(flags: Mapping[str, object]) -> Config:
    """What a server here would run with. Without a file its models do not matter, and the fake stands for them."""
    known = {key: flags.get(key) for key in ("config", "port")}
    if known["config"] is None and default_file({}, Path()) is None:
        known["backend"] = "fake"
    return read_or_exit(known)[1]


def _others(config: Config) -> Iterable[Path]:
    yield from sorted(config.runtime.path.glob("admin-*.sock"))
    yield _SYSTEM_SOCKET


def answers(path: Path) -> bool:
    """Whether somebody takes connections there."""
    try:
        _connected(path).close()
    except OSError:
        return False
    return True


def _connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_TIMEOUT)
        connection.connect(os.fspath(path))
    except BaseException:
        connection.close()
        raise
    return connection
