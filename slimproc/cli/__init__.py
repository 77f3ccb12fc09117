"""The command line. ``main`` is the script ``slimproc`` and ``python -m slimproc``."""

from __future__ import annotations

import io
import sys


def main() -> None:
    """Run one command and exit with its status.

    A ``serve`` with plain options does without typer, whose import (pydantic with it) costs as much as a third of the
    time from here to the first token of a small model.
    """
    if sys.argv[1:2] == ["serve"]:
        from slimproc.cli.options import read_plain

        flags = read_plain(sys.argv[2:])
        if flags is not None:
            from slimproc.cli.serve import serve

            sys.exit(serve(flags))
    from slimproc.cli.app import app

    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that it has no letters for is shown all the same
        sys.stdout.reconfigure(errors="backslashreplace")

    app(prog_name="slimproc")
