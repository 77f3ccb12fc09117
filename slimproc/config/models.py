"""Builds the ``models:`` part, each entry by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from slimproc.config.blocks import BLOCKS, COMMAND_KINDS, PROFILE_KINDS, REMOTE_KINDS
from slimproc.config.model import ANY_NAME, MODEL_KINDS, ModelConfig
from slimproc.config.problems import Given, Problem, at, shown
from slimproc.config.reading import known, located, located_spec, read_layers, read_value, text_file
from slimproc.config.scopes import check
from slimproc.config.values import NAME
from slimproc.config.whole import KINDS, MAX_QUEUE_TOTAL

if TYPE_CHECKING:
    from slimproc.config.yaml_source import Document  # imports PyYAML, which a start without a file does not need

INHERITED = ("request_timeout", "load_timeout", "unload_timeout", "prepare_timeout", "confine")
_ELSEWHERE = (
    dict.fromkeys(KINDS, "a model has none of its own: set it at the top level")
    | {key: f"set it inside the model's remote block: remote.{key}" for key in (*REMOTE_KINDS, "prepare")}
    | {key: f"set it inside the model's command block: command.{key}" for key in COMMAND_KINDS}
    | {key: f"set it inside the model's memory block: memory.{key}" for key in PROFILE_KINDS}
)
"""What to say about keys that stand in a model and belong elsewhere."""


class Entry(NamedTuple):
    """One model as it was given."""

    name: str
    place: Given
    keys: Mapping[str, Given]


def from_document(document: Document, problems: list[Problem]) -> list[Entry]:
    """The models in the file."""
    place = document.given(("models",), document.data.get("models"))
    if "models" not in document.data:
        problems.append(at(place._replace(line=1), "missing: wanted a mapping with at least one model"))
        return []
    models = place.inside
    if not models:
        found = "an empty one" if place.value == {} else shown(place.value)
        problems.append(at(place, f"wanted a mapping with at least one model, not {found}"))
        return []
    entries = []
    for name, given in models.items():
        read_value(NAME, given._replace(value=name), problems)
        if name == ANY_NAME:
            problems.append(at(given, 'a model cannot be called "*"; as an alias it takes any name'))
        if given.inside is None:
            problems.append(at(given, f"wanted a mapping of the model's settings, not {shown(given.value)}"))
            continue
        entries.append(Entry(name, given, given.inside))
    return entries


def build(
    entry: Entry,
    flags: Mapping[str, Given],
    inherited: Mapping[str, Any],
    environ: Mapping[str, str],
    problems: list[Problem],
    *,
    unmeasured: bool,
) -> ModelConfig | None:
    """One model, or None where it has problems. ``flags`` win over its keys; ``inherited``: see INHERITED.

    ``unmeasured``: an upstream may be without its memory.
    """
    mine: list[Problem] = []
    keys = known(entry.keys, {*MODEL_KINDS, *BLOCKS}, mine, _ELSEWHERE)
    plain = {key: place for key, place in keys.items() if key not in BLOCKS}
    values, _ = read_layers(MODEL_KINDS, [plain, flags], mine, texts=1)
    for key, block in BLOCKS.items():
        if key in keys and (read := block.read(keys[key], mine)) is not None:
            values[key] = read
    places = {**keys, **flags}
    check(entry.name, entry.place, values, places, mine, unmeasured=unmeasured)
    _locate(values, places, environ, mine)
    problems.extend(mine)
    if mine:
        return None
    values["display_name"] = values.pop("name", entry.name)
    defaults = {key: inherited[key] for key in INHERITED if key in inherited}
    if "backend" not in values:
        defaults["max_queue"] = inherited.get("max_queue_total", MAX_QUEUE_TOTAL)
    if "remote" in values:
        values["replicas"] = len(values["remote"].base_urls)
    origins = {key: place.origin for key, place in places.items()}
    return ModelConfig(name=entry.name, origins=origins, **{**defaults, **values})


def _locate(
    values: dict[str, Any], places: Mapping[str, Given], environ: Mapping[str, str], problems: list[Problem]
) -> None:
    """Make the paths absolute that are files of this machine."""
    if "path" in values:
        values["path"] = located_spec(values["path"], places["path"], environ)
    if "lora" in values:
        values["lora"] = tuple(
            msgspec.structs.replace(adapter, path=located_spec(adapter.path, places["lora"], environ))
            for adapter in values["lora"]
        )
    if "chat_template" in values:
        values["chat_template"] = text_file(values["chat_template"], places["chat_template"], environ, problems)
    if "command" in values:
        program, *arguments = values["command"].argv
        if "/" in program:  # without one it is looked for in PATH
            program = located(program, places["command"], environ)
        values["command"] = msgspec.structs.replace(values["command"], argv=(program, *arguments))
