"""The sockets that are listened on, the service manager's or our own: there before anything is started, so that a port
in use costs nothing.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from slimproc.config import Config, Listen
from slimproc.errors import ConfigError

BACKLOG: Final = 1024
PASSED_ADMIN: Final = "admin"
"""What the service manager calls the admin socket that it passes (FileDescriptorName=); the other one is public."""

_ALL_INTERFACES: Final = ("0.0.0.0", "::")  # noqa: S104  # what a passed socket may say


class Listeners:
    """The public TCP socket and the admin's unix socket, which only its owner may open and which goes when we do."""

    def __init__(self, config: Config, passed: Mapping[str, socket.socket] | None = None) -> None:
        """Take over what the service manager has ``passed``, and bind the rest as configured.

        Raises OSError, or ConfigError where the admin socket's directory is not safe or the passed ones do not fit.
        """
        others = dict(passed or {})
        admin = others.pop(PASSED_ADMIN, None)
        if admin is not None and admin.family != socket.AF_UNIX:
            raise ConfigError(f"the socket {PASSED_ADMIN!r} that systemd passed is no unix socket")
        public = _only(others)
        self.public = public or _bind(config.listen)
        host, self.port = self.public.getsockname()[:2]
        self._host = config.listen.host if public is None else host if host not in _ALL_INTERFACES else None
        self._owns_admin = admin is None
        if admin is None:
            self.admin_path = config.admin_socket_for(self.port)
            try:
                if config.admin_socket is None:
                    config.runtime.create()
                self.admin = _bind_admin(self.admin_path)
            except BaseException:
                self.public.close()
                raise
        else:
            self.admin_path = Path(admin.getsockname())
            self.admin = admin

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
        self.remove()

    def remove(self) -> None:
        """Take the admin socket's file away, unless it is the service manager's."""
        if self._owns_admin:
            self.admin_path.unlink(missing_ok=True)


def _only(passed: dict[str, socket.socket]) -> socket.socket | None:
    if len(passed) > 1:
        raise ConfigError(f"systemd passed several public sockets ({', '.join(passed)}); there can be one")
    for name, sock in passed.items():
        if sock.family == socket.AF_UNIX:
            raise ConfigError(f"the public socket {name!r} that systemd passed is no TCP socket")
        return sock
    return None


def _bind(listen: Listen) -> socket.socket:
    try:
        if listen.host is None and socket.has_dualstack_ipv6():
            return socket.create_server(("", listen.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
        family = socket.AF_INET6 if listen.host and ":" in listen.host else socket.AF_INET
        return socket.create_server((listen.host or "", listen.port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = str(error.strerror).partition(" (while ")[0]
        if error.errno == errno.EADDRINUSE:
            reason += " (--port takes another one)"
        raise OSError(error.errno, f"cannot listen on {listen}: {reason}") from error


def _bind_admin(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _clear(path)
        before = os.umask(0o177)
        try:
            sock.bind(str(path))
        finally:
            os.umask(before)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot make the admin socket {path}: {error.strerror or error}") from error
    sock.listen(16)
    return sock


def _clear(path: Path) -> None:
    """Take away a socket that no server answers on: a dead one left it. Raises OSError for whatever else is there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(str(path)) == 0:
            raise OSError(errno.EADDRINUSE, "another server uses it")
    if not path.is_socket() and (path.exists() or path.is_symlink()):
        raise OSError(errno.EEXIST, "it is there already, and is no socket")
    path.unlink(missing_ok=True)
