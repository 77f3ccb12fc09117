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
def check_config(
    file: Annotated[str | None, typer.Argument(metavar="[FILE]")] = None,
    *,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of all configurations.")] = False,
) -> None:
    """Say whether the configuration is right, and what it comes to; if not, every problem (exit 78)."""
    from slimproc.cli import check_config as command

    if schema:
        command.print_schema(file)
    else:
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


@app.command("import")
def import_config(
    file: Annotated[str, typer.Argument(metavar="FILE")],
    *,
    to: Annotated[str | None, typer.Option("--to", metavar="OUT", help="A new file; else it is printed.")] = None,
) -> None:
    """Turn a configuration of InferSwap or llama-swap into one of ours, and say what could not be carried over."""
    from slimproc.cli import importing as command

    sys.exit(command.import_config(file, to))


_Port = Annotated[str | None, typer.Option("--port", metavar="PORT", help="The server's port.")]
_Socket = Annotated[str | None, _option("admin_socket")]


@app.command()
def plan(
    model: str, *, config: ConfigFile = None, port: _Port = None, admin_socket: _Socket = None, json: AsJson = False
) -> None:
    """Say whether a model fits into memory now, and who would go for it (exit 2: it does not)."""
    from slimproc.cli import plan as command

    sys.exit(command.plan(model, {"config": config, "port": port, "admin_socket": admin_socket}, as_json=json))


_NoWait = Annotated[bool, typer.Option("--no-wait", help="Ask, and do not wait until it is done.")]


@app.command()
def load(
    model: str, *, config: ConfigFile = None, port: _Port = None, admin_socket: _Socket = None, no_wait: _NoWait = False
) -> None:
    """Have a running server load a model, also one that has failed."""
    from slimproc.cli.lifecycle import lifecycle

    flags = {"config": config, "port": port, "admin_socket": admin_socket}
    sys.exit(lifecycle("load", model, flags, wait=not no_wait))


@app.command()
def unload(
    model: str, *, config: ConfigFile = None, port: _Port = None, admin_socket: _Socket = None, no_wait: _NoWait = False
) -> None:
    """Have a running server unload a model, once it has finished what it does."""
    from slimproc.cli.lifecycle import lifecycle

    flags = {"config": config, "port": port, "admin_socket": admin_socket}
    sys.exit(lifecycle("unload", model, flags, wait=not no_wait))


def _text(switch: str, metavar: str, text: str) -> Any:
    return typer.Option(switch, metavar=metavar, help=text)


@app.command()
def measure(
    model: str,
    *,
    config: ConfigFile = None,
    rounds: Annotated[str | None, _text("--rounds", "N", "Times that it is loaded, asked and unloaded (3).")] = None,
    concurrency: Annotated[
        str | None, _text("--concurrency", "N", "Requests at once (as many as the model takes).")
    ] = None,
    requests: Annotated[str | None, _text("--requests", "N", "Times that they are sent in each round (1).")] = None,
    body: Annotated[str | None, _text("--body", "FILE", "What is sent to a server that is no engine of ours.")] = None,
    content_type: Annotated[str | None, _text("--content-type", "TYPE", "Of --body (by its name).")] = None,
    headroom: Annotated[str | None, _text("--headroom", "PERCENT", "On top of the peaks (5).")] = None,
    write: Annotated[bool, typer.Option("--write", help="Put the block into the configuration's file.")] = False,
) -> None:
    """Measure what memory a model needs, while no server runs, and print the block for the configuration."""
    flags = dict(locals())  # first of all, while there is nothing else in it
    from slimproc.cli.measuring import measure as command

    sys.exit(command(model, flags))


@app.command()
def bench(
    url: Annotated[str, typer.Argument(metavar="[URL]", show_default=False)] = "http://127.0.0.1:8000",
    *,
    streams: Annotated[str | None, _text("--streams", "N", "Closed loop: requests at a time (8).")] = None,
    rate: Annotated[str | None, _text("--rate", "R", "Open loop: Poisson arrivals a second.")] = None,
    requests: Annotated[str | None, _text("--requests", "N", "In all (8 a stream, or 10 s of the rate).")] = None,
    duration: Annotated[str | None, _text("--duration", "S", "No request begins after it.")] = None,
    completions: Annotated[bool, typer.Option("--completions/--chat", help="Which route.")] = False,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Answers as events, or whole.")] = True,
    max_tokens: Annotated[str | None, _text("--max-tokens", "N", "Of each answer (64).")] = None,
    prompt_words: Annotated[str | None, _text("--prompt-words", "N", "Of each prompt's own (16).")] = None,
    shared_prefix: Annotated[str | None, _text("--shared-prefix", "N", "Words that prompts begin with alike.")] = None,
    prefixes: Annotated[str | None, _text("--prefixes", "K", "Different shared beginnings (1).")] = None,
    cancel: Annotated[str | None, _text("--cancel", "P", "Leave in mid-stream with this probability.")] = None,
    warmup: Annotated[str | None, _text("--warmup", "N", "Requests before the clock starts.")] = None,
    model: Annotated[str | None, _text("--model", "NAME", "Default: the only one that the server lists.")] = None,
    api_key: Annotated[str | None, _text("--api-key", "KEY", "Sent as a bearer token.")] = None,
    field: Annotated[list[str] | None, _text("--field", "KEY=JSON", "One more field of each body; repeatable.")] = None,
    usage: Annotated[bool, typer.Option("--usage/--no-usage", help="Ask streams for their usage.")] = True,
    seed: Annotated[str | None, _text("--seed", "N", "Of arrivals, words and cancellations (0).")] = None,
    timeout: Annotated[str | None, _text("--timeout", "S", "Of one request (300).")] = None,
    slo_ttft: Annotated[str | None, _text("--slo-ttft", "MS", "A good answer's first token comes within this.")] = None,
    slo_itl: Annotated[str | None, _text("--slo-itl", "MS", "A good answer's mean time between tokens.")] = None,
    peer: Annotated[str | None, _text("--peer", "URL", "A second server: in turns, with ratios.")] = None,
    peer_model: Annotated[str | None, _text("--peer-model", "NAME", "The peer's (as --model).")] = None,
    peer_api_key: Annotated[str | None, _text("--peer-api-key", "KEY", "The peer's (as --api-key).")] = None,
    rounds: Annotated[str | None, _text("--rounds", "N", "Of both servers (3), or of the one (1).")] = None,
    json: Annotated[str | None, _text("--json", "FILE", "Write everything; - for stdout.")] = None,
    csv: Annotated[str | None, _text("--csv", "FILE", "Write one row a request; - for stdout.")] = None,
) -> None:
    """Measure a running server, slimproc or any other that speaks OpenAI's API."""
    flags = dict(locals())  # first of all, while there is nothing else in it
    from slimproc.cli import bench as command

    sys.exit(command.bench(flags))


@app.command()
def chaos(
    *,
    config: Annotated[
        str | None, _text("--config", "FILE", "Of the server that is broken (fake models that do not fit together).")
    ] = None,
    seed: Annotated[str | None, _text("--seed", "N", "Of requests and faults (0).")] = None,
    minutes: Annotated[str | None, _text("--minutes", "M", "How long (1).")] = None,
    clients: Annotated[str | None, _text("--clients", "N", "That ask all the time (16).")] = None,
    fault_every: Annotated[
        str | None, _text("--fault-every", "S", "Seconds between two faults, on average (5).")
    ] = None,
    report: Annotated[str | None, _text("--report", "FILE", "Write everything, as JSON.")] = None,
) -> None:
    """Start a server, ask and break it at random from a seed, and check that nothing is lost (exit 1: something is)."""
    flags = dict(locals())  # first of all, while there is nothing else in it
    from slimproc.cli import chaos as command

    sys.exit(command.chaos(flags))
