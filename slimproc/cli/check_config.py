"""``slimproc check-config``: every problem of the configuration, or what it comes to; or the schema of all of them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator

from slimproc import model_path
from slimproc.cli.configuration import read_or_exit
from slimproc.cli.output import print_json
from slimproc.config import Command, ModelConfig, Remote
from slimproc.config.values import spell
from slimproc.errors import LoadFailed


def print_schema(file: str | None) -> None:
    """Exits with status 2 where a file is named as well, which would not be looked at."""
    if file is not None:
        print("slimproc check-config: --schema is of no file: leave one of the two out", file=sys.stderr)
        sys.exit(2)
    from slimproc.config.schema import schema

    print_json(schema())


def check_config(file: str | None) -> None:
    """Exits with EX_CONFIG where something is wrong. What is not there yet is said, and is no error."""
    source, config = read_or_exit({"config": file})
    print(f"ok: {source or 'no file; the demo model'}")
    print(f"listen {config.listen}, default model {config.default_model or 'none'}")
    for model in config.models.values():
        print(", ".join([f"{model.name}: {_server(model)}", *_parts(model)]))
        for note in _notes(model):
            print(f"  note: {note}")


def _server(model: ModelConfig) -> str:
    """Who serves it, and how much of it at once."""
    match model.upstream:
        case Remote(base_urls=urls, contract=contract):
            return f"remote {' '.join(urls)}, contract {contract}, concurrency {model.concurrency}"
        case Command(argv=argv):
            return f"command {argv[0]}, concurrency {model.concurrency}"
        case None:
            context = model.context or "the model's own, up to 4096"
            return f"{model.backend}, replicas {model.replicas}, slots {model.slots}, context {context}"


def _parts(model: ModelConfig) -> Iterator[str]:
    if model.memory is not None:
        yield f"memory {spell(max(model.memory.load_peak, model.memory.inference_peak))} each"
    if model.device is not None:
        yield f"on {model.device}"
    if names := [alias for alias in model.aliases if alias != "*"]:
        yield f"also called {', '.join(names)}"
    if "*" in model.aliases:
        yield "answers to any other name"


def _notes(model: ModelConfig) -> Iterator[str]:
    """What a start would miss on this machine as it is now."""
    for path in (*((model.path,) if model.path else ()), *(adapter.path for adapter in model.lora)):
        try:
            model_path.resolve(path)
        except LoadFailed as error:
            yield str(error)
    programs = (model.command.argv[0] if model.command else "", *(model.remote.prepare[:1] if model.remote else ()))
    for program in filter(None, programs):
        if shutil.which(program) is None:
            yield f"there is no program {program}"
