"""The directories that slimproc uses when the configuration does not name them: systemd's, the user's, or a private one."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from slimproc.errors import ConfigError


class RuntimeDirectory(msgspec.Struct, frozen=True):
    """Where admin sockets are. ``exclusive``: this server's alone (systemd's), so that its socket needs no port."""

    path: Path
    exclusive: bool = False

    def socket_for(self, port: int) -> Path:
        return self.path / ("admin.sock" if self.exclusive else f"admin-{port}.sock")

    def create(self) -> None:
        """Make the directory with mode 0700. Raises ConfigError where another user could put a socket there."""
        if self.exclusive:
            return
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.path.lstat()
        except OSError as error:
            raise ConfigError(f"cannot make {self.path} for the admin socket: {error.strerror}") from None
        owned = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
        if not owned or stat.S_IMODE(status.st_mode) & 0o022:
            raise ConfigError(f"{self.path} must be a directory that only this user can write: set admin_socket")


def runtime_directory(environ: Mapping[str, str]) -> RuntimeDirectory:
    """$RUNTIME_DIRECTORY (systemd), else $XDG_RUNTIME_DIR/slimproc, else slimproc-UID in the temporary directory."""
    if given := _first_absolute(environ.get("RUNTIME_DIRECTORY")):
        return RuntimeDirectory(given, exclusive=True)
    if given := _first_absolute(environ.get("XDG_RUNTIME_DIR")):
        return RuntimeDirectory(given / "slimproc")
    temporary = _first_absolute(environ.get("TMPDIR")) or Path(tempfile.gettempdir())
    return RuntimeDirectory(temporary / f"slimproc-{os.geteuid()}")


def state_directory(environ: Mapping[str, str]) -> Path:
    """$STATE_DIRECTORY (systemd), else $XDG_STATE_HOME/slimproc, else ~/.local/state/slimproc."""
    if given := _first_absolute(environ.get("STATE_DIRECTORY")):
        return given
    if given := _first_absolute(environ.get("XDG_STATE_HOME")):
        return given / "slimproc"
    return home(environ) / ".local" / "state" / "slimproc"


def home(environ: Mapping[str, str]) -> Path:
    """$HOME, else what the user database says; the root where neither is known, as systemd's units without a user."""
    if given := _first_absolute(environ.get("HOME")):
        return given
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def _first_absolute(value: str | None) -> Path | None:
    """The first directory, as systemd joins several with colons; the XDG specification says to ignore relative ones."""
    path = Path((value or "").split(":")[0])
    return path if path.is_absolute() else None
