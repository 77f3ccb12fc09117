"""Builds the ``models:`` part: each entry by itself, then what must hold between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from slimproc.config.model import ANY_NAME, LATER_OF_MODEL, MODEL_KINDS, ModelConfig
from slimproc.config.problems import Given, Problem, at, shown
from slimproc.config.reading import known, located_spec, read_fake, read_layers, read_value, text_file
from slimproc.config.values import NAME

if TYPE_CHECKING:
    from slimproc.config.yaml_source import Document  # imports PyYAML, which a start without a file does not need

INHERITED = ("request_timeout", "load_timeout", "unload_timeout")
MAX_CELLS = 2**31 - 1
"""llama.cpp counts the cells of one context in 32 bits; slots times context is one such count."""


class Entry(NamedTuple):
    """One model as it was given. ``fake``: the entries of its fake block, where it has one."""

    name: str
    place: Given
    keys: Mapping[str, Given]
    fake: Mapping[str, Given] | None = None


def from_document(document: Document, problems: list[Problem]) -> list[Entry]:
    """The models in the file."""
    place = document.given(("models",), document.data.get("models"))
    if "models" not in document.data:
        problems.append(at(place._replace(line=1), "missing: wanted a mapping with at least one model"))
        return []
    models = place.value
    if not isinstance(models, dict) or not models:
        found = "an empty one" if models == {} else shown(models)
        problems.append(at(place, f"wanted a mapping with at least one model, not {found}"))
        return []
    entries = []
    for name, given in document.children(("models",), models).items():
        read_value(NAME, given._replace(value=name), problems)
        if name == ANY_NAME:
            problems.append(at(given, 'a model cannot be called "*"; as an alias it takes any name'))
        if not isinstance(given.value, dict):
            problems.append(at(given, f"wanted a mapping of the model's settings, not {shown(given.value)}"))
            continue
        keys = document.children(("models", name), given.value)
        block = given.value.get("fake")
        fake = document.children(("models", name, "fake"), block) if isinstance(block, dict) else None
        entries.append(Entry(name, given, keys, fake))
    return entries


def build(
    entry: Entry,
    flags: Mapping[str, Given],
    inherited: Mapping[str, Any],
    environ: Mapping[str, str],
    problems: list[Problem],
) -> ModelConfig | None:
    """One model, or None where it has problems. ``flags`` win over its keys; ``inherited``: see INHERITED."""
    mine: list[Problem] = []
    keys = known(entry.keys, {*MODEL_KINDS, "fake"}, LATER_OF_MODEL, mine)
    fake = keys.pop("fake", None)
    values, places = read_layers(MODEL_KINDS, [keys, flags], mine, texts=1)
    _check(entry, values, places, mine)
    if entry.fake is not None:
        values["fake"] = read_fake(entry.fake, mine)
    if "path" in values:
        values["path"] = located_spec(values["path"], places["path"], environ)
    if "chat_template" in values:
        values["chat_template"] = text_file(values["chat_template"], places["chat_template"], environ, mine)
    problems.extend(mine)
    if mine:
        return None
    origins = {key: place.origin for key, place in places.items()}
    if fake is not None:
        origins["fake"] = fake.origin
    values["display_name"] = values.pop("name", entry.name)
    defaults = {key: inherited[key] for key in INHERITED if key in inherited}
    return ModelConfig(name=entry.name, origins=origins, **{**defaults, **values})


def _check(entry: Entry, values: Mapping[str, Any], places: Mapping[str, Given], problems: list[Problem]) -> None:
    """What must hold between the keys of one model."""
    backend = values.get("backend")
    if "backend" not in entry.keys and not LATER_OF_MODEL.intersection(entry.keys):
        problems.append(at(entry.place, f"its backend is missing: wanted {MODEL_KINDS['backend'].wanted}"))
    if (block := entry.keys.get("fake")) is not None:
        if entry.fake is None:
            problems.append(at(block, f"wanted a mapping of the fake backend's settings, not {shown(block.value)}"))
        elif backend not in ("fake", None):
            problems.append(at(block, f"only the fake backend takes it, and this model's backend is {backend}"))
    if backend == "fake" and "path" in places:
        problems.append(at(places["path"], "the fake backend has no file"))
    if backend not in ("fake", None) and "path" not in entry.keys:
        problems.append(at(entry.place, f"its path is missing: backend {backend} needs one"))
    if backend not in ("llama_cpp", None) and "pooling" in places:
        problems.append(at(places["pooling"], f"only llama_cpp takes it, and this model's backend is {backend}"))
    context, slots = values.get("context", 0), values.get("slots", 4)
    if context * slots > MAX_CELLS:
        problems.append(
            at(places["context"], f"times slots this is {context * slots}; at most {MAX_CELLS} is possible")
        )


def check_names(entries: Iterable[Entry], problems: list[Problem]) -> None:
    """No alias twice, and none that is a model's name: a caller's name means one model."""
    names = {entry.name for entry in entries}
    owners: dict[str, str] = {}
    for entry in entries:
        place = entry.keys.get("aliases")
        for alias in place.value if place is not None and isinstance(place.value, list) else ():
            if not isinstance(alias, str):
                continue  # a problem of its own by now
            assert place is not None
            if alias in names:
                problems.append(at(place, f"alias {shown(alias)} is a model's name"))
            elif alias in owners:
                problems.append(at(place, f"alias {shown(alias)} is taken: {shown(owners[alias])} has it"))
            else:
                owners[alias] = entry.name
