"""Which keys which kind of model takes, and what must hold between the keys of one model."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from slimproc.config.model import (
    LIFECYCLE_KEYS,
    LOCAL_ENDPOINTS,
    LOCAL_KEYS,
    MODEL_KINDS,
    UPSTREAM_KEYS,
)
from slimproc.config.problems import Given, Problem, at
from slimproc.settings import BACKENDS

MAX_CELLS = 2**31 - 1
"""llama.cpp counts the cells of one context in 32 bits; slots times context is one such count."""
SERVERS = ("backend", "remote", "command")
"""Who serves a model: it has exactly one of these keys."""

Values = Mapping[str, Any]
Places = Mapping[str, Given]


def check(
    name: str, place: Given, values: Values, places: Places, problems: list[Problem], *, unmeasured: bool
) -> None:
    """``places``: every key that was given, ``values`` those that could be read. ``unmeasured``: memory may be missing."""
    servers = [key for key in SERVERS if key in places]
    if not servers:
        wanted = f"wanted {MODEL_KINDS['backend'].wanted}; or remote or command, for a server that is no engine of ours"
        problems.append(at(place, f"its backend is missing: {wanted}"))
    elif len(servers) > 1:
        problems.append(at(places[servers[1]], f"a model is served by one: {' or '.join(servers)}"))
    elif servers == ["backend"]:
        _check_local(place, values, places, problems)
    else:
        _check_upstream(servers[0], place, values, places, problems)
        _check_memory(name, place, values, places, problems, unmeasured=unmeasured)


def _check_local(place: Given, values: Values, places: Places, problems: list[Problem]) -> None:
    backend = values.get("backend")
    _refuse(UPSTREAM_KEYS, "only a model with remote or command takes it, and this one has a backend", places, problems)
    if backend is None:
        return  # which is a problem of its own by now
    traits = BACKENDS[backend]
    if traits.has_file and "path" not in places:
        problems.append(at(place, f"its path is missing: backend {backend} needs one"))
    if not traits.has_file and "path" in places:
        problems.append(at(places["path"], f"the {backend} backend has no file"))
    for other, its in BACKENDS.items():
        if other != backend:
            _refuse(its.own_keys, f"only {other} takes it, and this model's backend is {backend}", places, problems)
    context, slots = values.get("context", 0), values.get("slots", 4)
    if context * slots > MAX_CELLS:
        problems.append(
            at(places["context"], f"times slots this is {context * slots}; at most {MAX_CELLS} is possible")
        )
    kv_type = values.get("kv_type", "f16")
    if kv_type != "f16" and values.get("flash_attention") is False:
        problems.append(at(places["kv_type"], f"{kv_type} needs flash_attention: true"))
    if values.get("inference_path", LOCAL_ENDPOINTS[0]) not in LOCAL_ENDPOINTS:
        wanted = f"a local model answers one of {', '.join(LOCAL_ENDPOINTS)}"
        problems.append(at(places["inference_path"], wanted))


def _check_upstream(server: str, place: Given, values: Values, places: Places, problems: list[Problem]) -> None:
    _refuse(LOCAL_KEYS, f"only a model with a backend takes it, and this one has {server}", places, problems)
    problems.extend(
        at(place, f"its {key} is missing: wanted {MODEL_KINDS[key].wanted}")
        for key in ("inference_path", "max_body")
        if key not in places
    )
    remote = values.get("remote")
    if "prepare_timeout" in places and (server == "command" or (remote is not None and not remote.prepare)):
        problems.append(at(places["prepare_timeout"], "this model has no remote.prepare"))


def _check_memory(
    name: str, place: Given, values: Values, places: Places, problems: list[Problem], *, unmeasured: bool
) -> None:
    """An upstream's memory: measured where it is loaded and unloaded, and nothing of the kind where it is not."""
    remote, memory = values.get("remote"), values.get("memory")
    if remote is not None and remote.contract == "none":
        message = "with contract: none the model is neither loaded nor unloaded here"
        _refuse(LIFECYCLE_KEYS - {"prepare_timeout"}, message, places, problems)
    elif "memory" not in places and not unmeasured and (remote is not None or "command" in values):
        advice = f"`slimproc measure {shlex.quote(name)}` measures it and writes it"
        problems.append(at(place, f"its memory is missing: {advice}"))
    elif memory is not None and values.get("concurrency", 1) > memory.max_concurrency:
        measured = f"it was measured with at most {memory.max_concurrency} at once (memory.max_concurrency)"
        problems.append(at(places["concurrency"], measured))


def _refuse(keys: frozenset[str], message: str, places: Places, problems: list[Problem]) -> None:
    problems.extend(at(place, message) for key, place in places.items() if key in keys)
