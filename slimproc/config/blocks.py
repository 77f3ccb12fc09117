"""The blocks of a configuration: keys whose values are mappings with keys of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from slimproc.config.addresses import BASE_URLS, URL_PATH
from slimproc.config.lists import ABSOLUTE_ARGV, ARGV, DEVICES, ENVIRONMENT, PORT_VARIABLE
from slimproc.config.problems import Given, Problem, at, shown
from slimproc.config.reading import known, read_layers
from slimproc.config.upstream import Command, MemoryPolicy, MemoryProfile, Remote
from slimproc.config.values import BOOLEAN, MIB, TEXT, Kind, choice, integer, seconds, size
from slimproc.settings import FakeSettings

S = TypeVar("S")
Values = Mapping[str, Any]
Places = Mapping[str, Given]
_ANY_SIZE = size(0, 1 << 50)


class Block(NamedTuple, Generic[S]):
    """``check`` says what must hold between the keys; ``blocks`` are those inside this one."""

    what: str
    kinds: Mapping[str, Kind[Any]]
    make: Callable[..., S]
    required: tuple[str, ...] = ()
    check: Callable[[Values, Places, list[Problem]], None] | None = None
    blocks: Mapping[str, Block[Any]] = {}

    def read(self, given: Given, problems: list[Problem]) -> S | None:
        """The block that stands at ``given``, or None with at least one problem."""
        if given.inside is None:
            problems.append(at(given, f"wanted a mapping of {self.what}, not {shown(given.value)}"))
            return None
        mine: list[Problem] = []
        keys = known(given.inside, {*self.kinds, *self.blocks}, mine)
        plain = {key: place for key, place in keys.items() if key not in self.blocks}
        values, _ = read_layers(self.kinds, [plain], mine, texts=1)
        for key, block in self.blocks.items():
            if key in keys:
                values[key] = block.read(keys[key], mine)
        missing = [key for key in self.required if key not in given.inside]
        mine.extend(at(given, f"its {key} is missing: wanted {self.kinds[key].wanted}") for key in missing)
        if self.check is not None:
            self.check(values, keys, mine)
        problems.extend(mine)
        return None if mine else self.make(**values)


def _check_profile(values: Values, places: Places, problems: list[Problem]) -> None:
    peak = max(values.get("load_peak", 0), values.get("inference_peak", 0))
    if values.keys() >= {"load_peak", "inference_peak", "residual"} and values["residual"] > peak:
        problems.append(at(places["residual"], f"what stays after an unload is more than the peaks: at most {peak}"))


def _check_remote(values: Values, places: Places, problems: list[Problem]) -> None:
    if "contract" in places and "contract" not in values:
        return
    contract = values.get("contract", "control")
    if contract == "none" and "prepare" in places:
        problems.append(at(places["prepare"], "with contract: none nothing is loaded, and so nothing is prepared"))
    if contract == "control" and "health_path" in places:
        problems.append(at(places["health_path"], "it is asked for with contract: none only"))


def _check_command(values: Values, places: Places, problems: list[Problem]) -> None:
    if "argv" not in values or ("env" in places and "env" not in values):
        return
    if not any(PORT_VARIABLE in text for text in (*values["argv"][1:], *values.get("env", {}).values())):
        message = f"no argument has {PORT_VARIABLE} in it: the server must listen on the port that it is given"
        problems.append(at(places["argv"], message))


def _make_remote(base_url: tuple[str, ...], prepare: tuple[str, ...] = (), **rest: Any) -> Remote:
    return Remote(base_urls=base_url, prepare=prepare, **rest)


FAKE_KINDS: dict[str, Kind[Any]] = {
    "ttft": seconds(zero=True),
    "token_latency": seconds(zero=True),
    "load_time": seconds(zero=True),
    "load_error": TEXT,
    "die_in_load": integer(1, 64),
    "ignore_sigterm": BOOLEAN,
    "hang_in_unload": BOOLEAN,
    "unload_time": seconds(zero=True),
    "bytes": _ANY_SIZE,
}
PROFILE_KINDS: dict[str, Kind[Any]] = {
    "load_peak": _ANY_SIZE,
    "inference_peak": _ANY_SIZE,
    "residual": _ANY_SIZE,
    "max_concurrency": integer(1, 4096),
    "profile_id": TEXT,
}
POLICY_KINDS: dict[str, Kind[Any]] = {
    "margin": _ANY_SIZE,
    "max_sample_age": seconds(),
    "devices": DEVICES,
    "host_limit": size(MIB, 1 << 50),
}
REMOTE_KINDS: dict[str, Kind[Any]] = {
    "base_url": BASE_URLS,
    "contract": choice("control", "none"),
    "health_path": URL_PATH,
}
PREPARE_KINDS: dict[str, Kind[Any]] = {"argv": ABSOLUTE_ARGV}
COMMAND_KINDS: dict[str, Kind[Any]] = {"argv": ARGV, "env": ENVIRONMENT, "ready_path": URL_PATH}

FAKE = Block("the fake backend's settings", FAKE_KINDS, FakeSettings)
PROFILE = Block(
    "what the model was measured to need", PROFILE_KINDS, MemoryProfile, ("load_peak", "inference_peak"), _check_profile
)
POLICY = Block("the memory's settings", POLICY_KINDS, MemoryPolicy)
_PREPARE = Block("the preparation's settings", PREPARE_KINDS, lambda argv: argv, ("argv",))
REMOTE = Block(
    "the remote server's settings", REMOTE_KINDS, _make_remote, ("base_url",), _check_remote, {"prepare": _PREPARE}
)
COMMAND = Block("the command's settings", COMMAND_KINDS, Command, ("argv",), _check_command)
BLOCKS: dict[str, Block[Any]] = {"fake": FAKE, "memory": PROFILE, "remote": REMOTE, "command": COMMAND}
"""Those of a model, by key: ``model.MODEL_BLOCKS``."""
