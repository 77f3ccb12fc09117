"""What systemd tells a service and wants to hear from it: readiness, its watchdog, and the sockets that it has opened.

Written from sd_notify(3), sd_watchdog_enabled(3) and sd_listen_fds(3). Without systemd nothing here does anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Mapping, MutableMapping
from typing import Final

from slimproc.errors import ConfigError

_FIRST_FD: Final = 3
_PINGS: Final = 4
"""In a watchdog's time: one may be late, and one lost, before systemd loses patience."""
_PATIENCE: Final = 1.0
"""Seconds, for what is said once and must arrive: systemd would wait for it."""


class ServiceManager:
    """What started us, if it wants to be told. No method raises: a manager that cannot be reached changes nothing here."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        path = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path if path.startswith("/") else ""
        self._ping_every = _ping_every(environ) if self._address else None
        self._status = ""

    def ready(self, status: str) -> None:
        """We serve. Also the end of ``reloading``."""
        self._tell(f"READY=1\nSTATUS={_line(status)}", patience=_PATIENCE)

    def status(self, text: str) -> None:
        """A line for people, which ``systemctl status`` shows; said when it changes."""
        if text != self._status:
            self._status = text
            self._tell(f"STATUS={_line(text)}")

    def reloading(self) -> None:
        self._tell(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}", patience=_PATIENCE)

    def stopping(self, status: str) -> None:
        self._tell(f"STOPPING=1\nSTATUS={_line(status)}", patience=_PATIENCE)

    async def ping(self) -> None:
        """Tell the watchdog, for ever, that this event loop goes round; at once over where there is no watchdog."""
        while self._ping_every is not None:
            self._tell("WATCHDOG=1")
            await asyncio.sleep(self._ping_every)

    def _tell(self, message: str, patience: float = 0.0) -> None:
        """Where the manager's queue is full, wait ``patience`` seconds at most: that holds up the whole loop."""
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(patience)
            sock.sendto(message.encode(errors="replace"), self._address)


def _line(text: str) -> str:
    return text.replace("\n", " ")


def _ping_every(environ: Mapping[str, str]) -> float | None:
    """Seconds; None without a watchdog, or where it is for another process."""
    microseconds = environ.get("WATCHDOG_USEC", "")
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    if not microseconds.isascii() or not microseconds.isdigit() or not int(microseconds):
        return None
    return int(microseconds) / 1e6 / _PINGS


def take_sockets(environ: MutableMapping[str, str]) -> dict[str, socket.socket]:
    """The listening sockets that were passed to this process, by name (FileDescriptorName=; ``unknown`` without one).

    The variables are taken away, so that no child believes that they are meant for it. Raises ConfigError for what is
    passed and is no listening stream socket, or has the name of another.
    """
    owner, count, names = (environ.pop(f"LISTEN_{name}", "") for name in ("PID", "FDS", "FDNAMES"))
    if owner != str(os.getpid()) or not count.isascii() or not count.isdigit():
        return {}
    called = names.split(":")
    passed: dict[str, socket.socket] = {}
    with contextlib.ExitStack() as undo:
        for place in range(int(count)):
            name = (called[place] if place < len(called) else "") or "unknown"
            sock = undo.enter_context(_adopt(_FIRST_FD + place, name))
            if passed.setdefault(name, sock) is not sock:
                raise ConfigError(f"systemd passed two sockets that are called {name!r}")
        undo.pop_all()
    return passed


def _adopt(fd: int, name: str) -> socket.socket:
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        raise ConfigError(
            f"systemd passed {name!r} as descriptor {fd}, and that is no socket: {error.strerror}"
        ) from None
    try:
        listens = sock.type == socket.SOCK_STREAM and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError:
        listens = False
    if not listens or sock.family not in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
        sock.close()
        raise ConfigError(f"systemd passed {name!r}, which is no stream socket that listens (ListenStream=, Accept=no)")
    sock.set_inheritable(False)
    return sock
