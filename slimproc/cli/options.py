"""The options of ``serve``, in one table that typer's command and the quick reading of plain options share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Option(NamedTuple):
    """``metavar`` None: a switch, with a ``--no-`` form. Everything else is text, which the configuration checks."""

    key: str
    switches: tuple[str, ...]
    metavar: str | None
    help: str


OPTIONS = (
    Option("config", ("--config", "-c"), "FILE", "The configuration; slimproc.yaml in this directory if there is one."),
    Option("model", ("--model",), "FILE", "Serve this one model, under any name: a file, package:… or hf:…."),
    Option("backend", ("--backend",), "NAME", "What runs --model: llama_cpp, mlx, or fake, which needs no model."),
    Option("host", ("--host",), "HOST", "The address to listen on, without the port."),
    Option("port", ("--port",), "PORT", "The port to listen on; 0: any free one."),
    Option("listen", ("--listen",), "HOST:PORT", "Both at once."),
    Option("replicas", ("--replicas",), "N", "Engines of the only model."),
    Option("threads", ("--threads",), "N", "Threads of each of its engines."),
    Option("slots", ("--slots",), "N", "Sequences at once in each of its engines."),
    Option("context", ("--context",), "TOKENS", "Tokens of one sequence, prompt and answer together."),
    Option("log_level", ("--log-level",), "LEVEL", "debug, info, warning or error."),
    Option("log_json", ("--log-json",), None, "Log lines as JSON."),
    Option("admin_socket", ("--admin-socket",), "PATH", "The unix socket of ps and the other admin commands."),
)


def read_plain(arguments: Sequence[str]) -> dict[str, object] | None:
    """``--key value`` and ``--key=value`` of known options; None for anything else, which typer is to judge."""
    flags: dict[str, object] = {}
    rest = iter(arguments)
    for argument in rest:
        switch, equals, value = argument.partition("=")
        option = _SWITCHES.get(switch)
        if option is None or (equals and not switch.startswith("--")):
            return None
        if option.metavar is None:
            if equals:
                return None
            flags[option.key] = not switch.startswith("--no-")
            continue
        if not equals:
            value = next(rest, "-")
            if value.startswith("-"):
                return None
        flags[option.key] = value
    return flags


_SWITCHES = {switch: option for option in OPTIONS for switch in option.switches}
_SWITCHES |= {"--no-" + switch[2:]: option for switch, option in _SWITCHES.items() if option.metavar is None}
