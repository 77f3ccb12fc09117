"""What must hold between the models, and between them and the top-level settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slimproc.config.addresses import canonical_host, read_base_url, server_of
from slimproc.config.problems import Given, Problem, at, shown
from slimproc.config.upstream import MemoryPolicy
from slimproc.config.values import Listen, Wrong

if TYPE_CHECKING:
    from slimproc.config.models import Entry

_BY_UUID = ("GPU-", "MIG-")

Values = Mapping[str, Any]
Places = Mapping[str, Given]


def check_names(entries: Iterable[Entry], problems: list[Problem]) -> None:
    """No alias twice, and none that is a model's name: a caller's name means one model."""
    names = {entry.name for entry in entries}
    owners: dict[str, str] = {}
    for entry in entries:
        place = entry.keys.get("aliases")
        for alias in _aliases(entry):
            assert place is not None
            if alias in names:
                problems.append(at(place, f"alias {shown(alias)} is a model's name"))
            elif alias in owners:
                problems.append(at(place, f"alias {shown(alias)} is taken: {shown(owners[alias])} has it"))
            else:
                owners[alias] = entry.name


def check_default_model(
    values: dict[str, Any], places: Places, entries: Sequence[Entry], problems: list[Problem]
) -> None:
    """The default exists; the only model is the default."""
    wanted = values.get("default_model")
    if wanted is None and len(entries) == 1:
        values["default_model"] = entries[0].name
    elif wanted is not None:
        _check_known(wanted, places["default_model"], entries, problems)


def check_preload(values: Values, places: Places, entries: Sequence[Entry], problems: list[Problem]) -> None:
    """What is to be loaded at the start exists, and can be loaded."""
    for name in values.get("preload") or ():
        place = places["preload"]
        _check_known(name, place, entries, problems)
        if any(entry.name == name and _inside(entry, "remote", "contract") == "none" for entry in entries):
            problems.append(at(place, f"{shown(name)} is a server with contract: none, which is not loaded here"))


def check_servers(entries: Sequence[Entry], listen: Listen, problems: list[Problem]) -> None:
    """No two models share a base URL, since each would load and unload the other's; and none is slimproc itself."""
    owners: dict[tuple[str, int], str] = {}
    for entry in entries:
        mine: set[tuple[str, int]] = set()
        for place, url in _base_urls(entry):
            server = server_of(url)
            if server in owners:
                message = f"{url} is the server of {shown(owners[server])} already: each model needs its own"
                problems.append(at(place, message))
            elif _is_ours(server, listen):
                problems.append(at(place, f"{url} is where slimproc itself listens ({listen})"))
            mine.add(server)
        owners.update(dict.fromkeys(mine - owners.keys(), entry.name))


def check_devices(entries: Iterable[Entry], policy: MemoryPolicy, problems: list[Problem]) -> None:
    """A model's device is one that may be used."""
    for entry in entries:
        place = entry.keys.get("device")
        if policy.devices is not None and place is not None and not _is_among(str(place.value), policy.devices):
            listed = ", ".join(policy.devices)
            problems.append(at(place, f"memory.devices leaves {shown(place.value)} out: it has {listed}"))


def _is_among(device: str, listed: Sequence[str]) -> bool:
    """UUIDs may be abbreviated on both sides: whether they are the same is known when the GPUs are."""
    if not device.startswith(_BY_UUID):
        return device in listed
    uuids = [other for other in listed if other.startswith(_BY_UUID)]
    return any(device.startswith(other) or other.startswith(device) for other in uuids)


def _check_known(name: str, place: Given, entries: Sequence[Entry], problems: list[Problem]) -> None:
    names = [entry.name for entry in entries]
    if not names or name in names:
        return
    owner = next((entry.name for entry in entries if name in _aliases(entry)), None)
    listed = ", ".join(shown(name) for name in names[:10]) + (", …" if len(names) > 10 else "")
    there = f"it is an alias of {shown(owner)}" if owner is not None else f"there are {listed}"
    problems.append(at(place, f"there is no model {shown(name)}; {there}"))


def _aliases(entry: Entry) -> list[str]:
    place = entry.keys.get("aliases")
    given = place.value if place is not None else None
    return [alias for alias in given if isinstance(alias, str)] if isinstance(given, list) else []


def _inside(entry: Entry, block: str, key: str) -> Any:
    """The raw value of a key of one of the entry's blocks; None where there is none."""
    given = entry.keys.get(block)
    place = given.inside.get(key) if given is not None and given.inside is not None else None
    return None if place is None else place.value


def _base_urls(entry: Entry) -> Iterator[tuple[Given, str]]:
    """Those that can be read; what is wrong with the others is said elsewhere."""
    value = _inside(entry, "remote", "base_url")
    for url in value if isinstance(value, list) else [value]:
        try:
            read = read_base_url(url)
        except Wrong:
            continue
        inside = entry.keys["remote"].inside
        assert inside is not None
        yield inside["base_url"], read


def _is_ours(server: tuple[str, int], listen: Listen) -> bool:
    host, port = server
    mine = "localhost" if listen.host is None else canonical_host(listen.host)
    return port == listen.port and host == mine
