"""The configuration as the commands get it: from flags, this process's environment, ``.env`` and the file."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from slimproc.config import Config, default_file, load_config
from slimproc.errors import EX_CONFIG, ConfigError


def read(flags: Mapping[str, object], *, unmeasured: bool = False) -> tuple[Path | None, Config]:
    """The file that was read, if any, and the configuration. ``flags`` may name the file (``config``).

    ``unmeasured``: upstreams may be without ``memory``. Raises ConfigError.
    """
    rest = {key: value for key, value in flags.items() if key != "config"}
    named = flags.get("config")
    file = default_file(rest, Path()) if named is None else typed_path(str(named))
    return file, load_config(file, flags=rest, environ=os.environ, dotenv=Path(".env"), unmeasured=unmeasured)


def typed_path(text: str) -> Path:
    """A path as it was typed; a ``~`` that the shell has left is the home directory. Raises nothing: it may be nowhere."""
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ``~nobody``
        return Path(text)


def read_again(file: Path | None, flags: Mapping[str, object]) -> Config:
    """Read what ``read`` read, from the same places: also where the file is gone by now, or another one has come.

    Raises ConfigError.
    """
    rest = {key: value for key, value in flags.items() if key != "config"}
    return load_config(file, flags=rest, environ=os.environ, dotenv=Path(".env"))


def read_or_exit(flags: Mapping[str, object], *, unmeasured: bool = False) -> tuple[Path | None, Config]:
    """The same; a wrong configuration is told on stderr, a line a problem, and ends the process with EX_CONFIG."""
    try:
        return read(flags, unmeasured=unmeasured)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(EX_CONFIG)
