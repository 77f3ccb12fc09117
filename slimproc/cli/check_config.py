"""``slimproc check-config``: every problem of the configuration, or what it comes to."""

from __future__ import annotations

from slimproc import model_path
from slimproc.cli.configuration import read_or_exit
from slimproc.config import ModelConfig
from slimproc.errors import LoadFailed


def check_config(file: str | None) -> None:
    """Exits with EX_CONFIG where something is wrong. A model that is not there yet is said, and is no error."""
    source, config = read_or_exit({"config": file})
    print(f"ok: {source or 'no file; the demo model'}")
    print(f"listen {config.listen}, default model {config.default_model or 'none'}")
    for model in config.models.values():
        print(_summary(model))
        if model.path is not None:
            try:
                model_path.resolve(model.path)
            except LoadFailed as error:
                print(f"  note: {error}")


def _summary(model: ModelConfig) -> str:
    context = model.context or "the model's own, up to 4096"
    other = f", also called {', '.join(model.aliases)}" if model.aliases else ""
    return f"{model.name}: {model.backend}, replicas {model.replicas}, slots {model.slots}, context {context}{other}"
