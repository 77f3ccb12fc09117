"""``slimproc info``: the machine, the versions, and the effective configuration with where each value came from."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import psutil

from slimproc import __version__
from slimproc.cli.configuration import read
from slimproc.cli.output import print_json, print_table
from slimproc.config import Config
from slimproc.config.model import MODEL_BLOCKS, MODEL_KINDS
from slimproc.config.values import spell
from slimproc.config.whole import KINDS
from slimproc.errors import EX_CONFIG, ConfigError
from slimproc.residency.probes import cgroup
from slimproc.threads import default_threads, usable_cores

_PACKAGES = ("aiohttp", "uvloop", "msgspec", "llama-cpp-python")


def info(config_file: str | None, *, as_json: bool) -> int:
    """Print it all. A wrong configuration costs only its own part, and the status says so."""
    report: dict[str, Any] = {"hardware": hardware(), "versions": versions()}
    try:
        file, config = read({"config": config_file})
    except ConfigError as error:
        report["problems"] = str(error).splitlines()
    else:
        report["file"] = None if file is None else str(file)
        report["config"] = settings(config)
        report["models"] = {name: model_settings(config, name) for name in config.models}
    if as_json:
        print_json(report)
    else:
        _print_tables(report)
    return EX_CONFIG if "problems" in report else 0


def hardware() -> dict[str, Any]:
    """The machine; ``engine_threads``: with which an engine computes whose model does not say (key ``threads``)."""
    memory = psutil.virtual_memory()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count()
    return {
        "cpu": _cpu_model(),
        "architecture": platform.machine(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "usable_threads": usable,
        "engine_threads": default_threads(usable_cores()),
        "memory_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "memory_limit_bytes": min((limit.total for limit in cgroup.limits()), default=None),
    }


def versions() -> dict[str, str | None]:
    """None: not installed. Nothing is imported to find out."""
    found: dict[str, str | None] = {"slimproc": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    found["kernel"] = f"{platform.system()} {platform.release()}"
    return found


def settings(config: Config) -> dict[str, Any]:
    """Each top-level key with its value and origin."""
    keys = (*KINDS, "memory")
    shown = {key: {"value": _builtin(getattr(config, key)), "origin": config.origin(key)} for key in keys}
    if config.admin_socket is None and config.listen.port:
        shown["admin_socket"]["value"] = str(config.admin_socket_for(config.listen.port))
    return shown


def model_settings(config: Config, name: str) -> dict[str, Any]:
    """Each key that a model of its kind can have, with its value and origin."""
    model = config.models[name]
    values = {
        key: getattr(model, "display_name" if key == "name" else key)
        for key in (*MODEL_KINDS, *MODEL_BLOCKS)
        if model.takes(key)
    }
    return {
        key: {"value": _builtin(value), "origin": config.origin(f"models.{name}.{key}")}
        for key, value in values.items()
    }


def _builtin(value: Any) -> Any:
    """JSON's own types; a path or a listen address is its text."""
    if isinstance(value, (dict, list, tuple, msgspec.Struct)) and not hasattr(value, "port"):
        return msgspec.to_builtins(value)
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)


def _cpu_model() -> str:
    if sys.platform == "darwin":
        asked = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        )
        return asked.stdout.strip() or platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(models, platform.processor() or platform.machine())


def _print_tables(report: dict[str, Any]) -> None:
    machine = [(key, _cell(value, bytes_too=key.endswith("_bytes"))) for key, value in report["hardware"].items()]
    packages = [(key, value or "not installed") for key, value in report["versions"].items()]
    print_table(("hardware", ""), machine)
    print_table(("version", ""), packages)
    if "problems" in report:
        print("the configuration is wrong:", *report["problems"], sep="\n")
        return
    rows = [(key, _cell(entry["value"]), entry["origin"]) for key, entry in report["config"].items()]
    print_table(("setting", "value", "from"), rows)
    for name, keys in report["models"].items():
        rows = [(key, _cell(entry["value"]), entry["origin"]) for key, entry in keys.items()]
        print_table((f"model {name}", "value", "from"), rows)


def _cell(value: Any, *, bytes_too: bool = False) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "true" if value else "false"
        case int() if bytes_too:
            return f"{value} ({value / 2**30:.1f} GiB)" if value >= 2**30 else spell(value)
        case list() | tuple():
            return ", ".join(map(_cell, value)) or "-"
        case dict():
            return ", ".join(f"{key}: {_cell(inner)}" for key, inner in value.items())
        case _:
            return str(value)
