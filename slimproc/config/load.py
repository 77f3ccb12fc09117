"""load_config: file, ``.env``, environment and flags, each checked, the later over the earlier."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimproc.config import single
from slimproc.config.across import check_default_model, check_devices, check_names, check_preload, check_servers
from slimproc.config.blocks import POLICY, POLICY_KINDS
from slimproc.config.environment import from_dotenv, from_environment
from slimproc.config.model import MODEL_BLOCKS, MODEL_KINDS, ModelConfig
from slimproc.config.models import Entry, build, from_document
from slimproc.config.problems import Given, Problem, at, raise_all
from slimproc.config.reading import known, located, read_layers, read_value
from slimproc.config.runtime import runtime_directory, state_directory
from slimproc.config.upstream import MemoryPolicy
from slimproc.config.values import HOST, PORT, Listen
from slimproc.config.whole import KINDS, Config

DEFAULT_FILE = "slimproc.yaml"
MODEL_FLAGS = ("replicas", "threads", "slots", "context")
"""Flags that set a key of the only model."""
FLAGS = {*KINDS, "host", "port", "model", "backend", *MODEL_FLAGS}
_ELSEWHERE = dict.fromkeys({*MODEL_KINDS, *MODEL_BLOCKS}, "this is a setting of one model: set it there") | {
    key: f"set it inside the memory block: memory.{key}" for key in POLICY_KINDS
}
"""What to say about keys that stand at the top level and belong elsewhere."""


def default_file(flags: Mapping[str, object], directory: Path) -> Path | None:
    """The file to read where none was named: ``slimproc.yaml`` in ``directory``, unless flags say what to serve."""
    if flags.get("model") is not None or flags.get("backend") is not None:
        return None
    file = directory / DEFAULT_FILE
    return file if file.exists() else None


def load_config(
    file: Path | None,
    *,
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    dotenv: Path | None,
    unmeasured: bool = False,
) -> Config:
    """The configuration. ``flags``: names of FLAGS, values as typed (text follows the file's rules), None: not given.

    ``unmeasured``: upstreams may be without ``memory``, since they are to be measured. Raises ConfigError, whose message
    has one problem on each line.
    """
    assert FLAGS.issuperset(flags), f"no such flags: {sorted(set(flags) - FLAGS)}"
    given_flags = {k: Given(v, "flag", "--" + k.replace("_", "-")) for k, v in flags.items() if v is not None}
    problems: list[Problem] = []
    layers, entries = _from_file(file, given_flags, problems)
    for settings, found in (from_dotenv(dotenv) if dotenv else ({}, []), from_environment(environ)):
        layers.append(settings)
        problems.extend(found)
    layers.append({k: given for k, given in given_flags.items() if k in KINDS})
    plain = {key: given for key, given in layers[0].items() if key in KINDS}
    values, places = read_layers(KINDS, [plain, *layers[1:]], problems, texts=1)
    _host_and_port(values, places, given_flags, problems)
    _read_memory(layers[0], values, places, problems)
    models = _models(entries, given_flags, values, environ, problems, unmeasured=unmeasured)
    check_names(entries, problems)
    check_default_model(values, places, entries, problems)
    check_preload(values, places, entries, problems)
    check_servers(entries, values.get("listen", Listen()), problems)
    check_devices(entries, values.get("memory", MemoryPolicy()), problems)
    raise_all(problems)
    for key in ("admin_socket", "state_dir"):
        if key in values:
            values[key] = Path(located(values[key], places[key], environ))
    values.setdefault("state_dir", state_directory(environ))
    origins = {key: place.origin for key, place in places.items()}
    return Config(models=models, runtime=runtime_directory(environ), origins=origins, **values)


def _from_file(
    file: Path | None, flags: Mapping[str, Given], problems: list[Problem]
) -> tuple[list[Mapping[str, Given]], list[Entry]]:
    """The file's own layer of top-level settings, and the models, from wherever they are to come."""
    one = flags.get("model") or flags.get("backend")
    if file is None:
        return [{}], single.from_flags(flags, problems) if one else single.demo(problems)
    from slimproc.config import yaml_source  # noqa: PLC0415 - PyYAML costs 25 ms that a start without a file saves

    document = yaml_source.read(file)
    problems.extend(document.problems)
    top = document.children((), document.data)
    top.pop("models", None)
    layer = known(top, {*KINDS, "memory", "models"}, problems, _ELSEWHERE)
    if one is None:
        return [layer], from_document(document, problems)
    if "models" in document.data:
        problems.append(at(one, f"{file} has models of its own; leave one of the two out"))
    return [layer], single.from_flags(flags, problems)


def _read_memory(
    layer: Mapping[str, Given], values: dict[str, Any], places: dict[str, Given], problems: list[Problem]
) -> None:
    """The top-level ``memory:`` block, which only a file can have."""
    if "memory" in layer and (policy := POLICY.read(layer["memory"], problems)) is not None:
        values["memory"], places["memory"] = policy, layer["memory"]


def _host_and_port(
    values: dict[str, Any], places: dict[str, Given], flags: Mapping[str, Given], problems: list[Problem]
) -> None:
    """``--host`` and ``--port`` replace their part of ``listen``, wherever the rest of it came from."""
    for key, kind in (("host", HOST), ("port", PORT)):
        given = flags.get(key)
        if given is None:
            continue
        if "listen" in flags:
            problems.append(at(given, "--listen says it already; leave one of the two out"))
            continue
        before, count = values.get("listen", Listen()), len(problems)
        part = read_value(kind, given, problems, scalar_text=True)
        if len(problems) == count:
            values["listen"] = Listen(part, before.port) if key == "host" else Listen(before.host, part)
            both = "--host and --port" if flags.keys() >= {"host", "port"} else given.key
            places["listen"] = given._replace(key=both)


def _models(
    entries: list[Entry],
    flags: Mapping[str, Given],
    inherited: Mapping[str, Any],
    environ: Mapping[str, str],
    problems: list[Problem],
    *,
    unmeasured: bool,
) -> dict[str, ModelConfig]:
    own = {key: given for key, given in flags.items() if key in MODEL_FLAGS}
    if len(entries) > 1:
        problems.extend(at(given, f"there are {len(entries)} models; set it in the file") for given in own.values())
        own = {}
    built = (build(entry, own, inherited, environ, problems, unmeasured=unmeasured) for entry in entries)
    return {model.name: model for model in built if model is not None}
