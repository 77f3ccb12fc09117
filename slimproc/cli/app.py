"""The typer application: names, options and help of every command. What a command does is in its own file."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from slimproc import __version__
from slimproc.cli.options import OPTIONS

app = typer.Typer(
    help="Serves several small language models from one machine to many clients.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_OPTIONS = {option.key: option for option in OPTIONS}


def _option(key: str) -> Any:
    option = _OPTIONS[key]
    if option.metavar is None:
        return typer.Option(f"{option.switches[0]}/--no-{option.switches[0][2:]}", help=option.help)
    return typer.Option(*option.switches, metavar=option.metavar, help=option.help)


ConfigFile = Annotated[str | None, _option("config")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _version(wanted: bool) -> None:  # noqa: FBT001 - typer calls it so
    if wanted:
        print(f"slimproc {__version__}")
        raise typer.Exit


@app.callback()
def common(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def serve(
    *,
    config: ConfigFile = None,
    model: Annotated[str | None, _option("model")] = None,
    backend: Annotated[str | None, _option("backend")] = None,
    host: Annotated[str | None, _option("host")] = None,
    port: Annotated[str | None, _option("port")] = None,
    listen: Annotated[str | None, _option("listen")] = None,
    replicas: Annotated[str | None, _option("replicas")] = None,
    threads: Annotated[str | None, _option("threads")] = None,
    slots: Annotated[str | None, _option("slots")] = None,
    context: Annotated[str | None, _option("context")] = None,
    log_level: Annotated[str | None, _option("log_level")] = None,
    log_json: Annotated[bool | None, _option("log_json")] = None,
    admin_socket: Annotated[str | None, _option("admin_socket")] = None,
) -> None:
    """Serve the configured models, one model, or the demo model."""
    flags = dict(locals())  # first of all, while there is nothing else in it
    from slimproc.cli import serve as command

    sys.exit(command.serve(flags))


@app.command("check-config")
def check_config(file: Annotated[str | None, typer.Argument(metavar="[FILE]")] = None) -> None:
    """Say whether the configuration is right, and what it comes to; if not, every problem (exit 78)."""
    from slimproc.cli import check_config as command

    command.check_config(file)


@app.command()
def info(*, config: ConfigFile = None, json: AsJson = False) -> None:
    """Show the hardware, the versions and the effective configuration with where each value came from."""
    from slimproc.cli import info as command

    sys.exit(command.info(config, as_json=json))


@app.command()
def ps(
    *,
    config: ConfigFile = None,
    port: Annotated[str | None, typer.Option("--port", metavar="PORT", help="The server's port.")] = None,
    admin_socket: Annotated[str | None, _option("admin_socket")] = None,
    json: AsJson = False,
) -> None:
    """Show the replicas of a running server."""
    from slimproc.cli import ps as command

    sys.exit(command.ps({"config": config, "port": port, "admin_socket": admin_socket}, as_json=json))
