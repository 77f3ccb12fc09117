"""``slimproc serve``: reads the configuration and hands it to the server."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping

from slimproc.cli.configuration import read_again, read_or_exit
from slimproc.errors import EX_CONFIG, ConfigError, SlimprocError


def serve(flags: Mapping[str, object]) -> int:
    """Serve until told to stop. Returns the process's status; a failed start is one line on stderr."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # it means: read again, which the server does once it can
    file, config = read_or_exit(flags)
    from slimproc.server import run  # imports aiohttp, which a wrong configuration need not wait for

    try:
        return run(config, read=lambda: read_again(file, flags)) or 0
    except SlimprocError as error:
        print(f"slimproc: {error}", file=sys.stderr)
        return EX_CONFIG if isinstance(error, ConfigError) else 1
