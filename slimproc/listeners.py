"""The sockets that are listened on: bound before anything is started, so that a port in use costs nothing."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from slimproc.config import Config, Listen

BACKLOG: Final = 1024


class Listeners:
    """The public TCP socket and the admin's unix socket, which only its owner may open and which goes when we do."""

    def __init__(self, config: Config) -> None:
        """Bind both. Raises OSError, or ConfigError where the admin socket's directory is not safe."""
        self._host = config.listen.host
        self.public = _bind(config.listen)
        self.port: int = self.public.getsockname()[1]
        self.admin_path = config.admin_socket_for(self.port)
        if config.admin_socket is None:
            config.runtime.create()
        self.admin = _bind_admin(self.admin_path)

    @property
    def url(self) -> str:
        """Where a client on this machine finds the public one."""
        host = self._host or "127.0.0.1"
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.public.close()
        self.admin.close()
        self.admin_path.unlink(missing_ok=True)


def _bind(listen: Listen) -> socket.socket:
    try:
        if listen.host is None and socket.has_dualstack_ipv6():
            return socket.create_server(("", listen.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
        family = socket.AF_INET6 if listen.host and ":" in listen.host else socket.AF_INET
        return socket.create_server((listen.host or "", listen.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {listen}: {os.strerror(error.errno or 0)}") from error


def _bind_admin(path: Path) -> socket.socket:
    """A file that no server answers on is what a dead server left, and is replaced."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(str(path)) == 0:
            raise OSError(errno.EADDRINUSE, f"another server uses the admin socket {path}")
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        sock.bind(str(path))
    except OSError as error:
        raise OSError(error.errno, f"cannot make the admin socket {path}: {error}") from error
    finally:
        os.umask(before)
    sock.listen(16)
    return sock
