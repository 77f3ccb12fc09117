"""Which devices may be used: those that there are, the configuration names and CUDA_VISIBLE_DEVICES leaves."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slimproc.errors import ConfigError
from slimproc.residency.probes.lines import ABSENT
from slimproc.residency.views import HOST, Sample
from slimproc.settings import BackendTraits

_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_ORDER: Final = "CUDA_DEVICE_ORDER"
_BY_UUID: Final = ("GPU-", "MIG-")
_GPU_LIBRARIES: Final = ("cuda", "hip", "vulkan", "metal", "sycl", "musa", "cann", "opencl")
"""ggml's backends for GPUs, as their library files are called."""


@dataclass(frozen=True)
class Usable:
    """``devices``: what may be used, best first (GPUs, then the host). ``warnings``: what an operator may not have meant."""

    devices: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def usable_devices(
    sample: Sample, wanted: Sequence[str] | None, environ: Mapping[str, str], *, driver: str | None = ""
) -> Usable:
    """The devices of ``sample`` that ``memory.devices`` (``wanted``; None: all) and CUDA_VISIBLE_DEVICES both allow.

    ``wanted`` names GPUs by UUID, of which any beginning will do that only one has. Raises ConfigError for one that there is
    not, and says what there is. ``driver`` is the sampler's: while it is a fault, or None, nobody can tell which GPUs
    there are; then a whole UUID is taken as it stands, with a warning.
    """
    gpus = _in_order(sample)
    visible, warnings = visible_gpus(sample, environ)
    if wanted is None:
        return Usable((*visible, HOST), tuple(warnings))
    knowable = driver in ("", ABSENT)
    chosen: list[str] = []
    for name in wanted:
        if name == HOST:
            device = HOST
        elif (found := _beginning_with(name, gpus)) and found in visible:
            device = found
        elif found:
            hides = f"{_VISIBLE}={environ.get(_VISIBLE)}"
            raise ConfigError(
                f"memory.devices: {hides} hides {name}; it leaves {_list(visible)}", param="memory.devices"
            )
        elif not knowable and name.startswith(_BY_UUID):
            device = name
            warnings.append(
                f"memory.devices: whether there is a {name} cannot be told while the driver does not answer"
            )
        else:
            raise ConfigError(
                f"memory.devices: there is no device {name!r}, or more than one; there are {_list([*gpus, HOST])}",
                param="memory.devices",
            )
        if device not in chosen:
            chosen.append(device)
    return Usable(tuple(chosen), tuple(warnings))


def resolve_device(name: str, usable: Sequence[str], *, param: str = "device") -> str:
    """The one device of ``usable`` that a model's ``device:`` means. Raises ConfigError, which lists them."""
    found = name if name in usable else _beginning_with(name, usable)
    if found is None:
        raise ConfigError(f"{param}: there is no device {name!r} that may be used, only {_list(usable)}", param=param)
    return found


def visible_gpus(sample: Sample, environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order, and warnings. Without it all, in the order of the PCI bus.

    It is read as CUDA reads it (CUDA C++ Programming Guide, "Environment variables"): a list that ends at the first entry
    that names no GPU (``-1``, ``NoDevFiles``), and that is worth nothing when an entry is repeated. A number counts GPUs
    in the order of the PCI bus, as with CUDA_DEVICE_ORDER=PCI_BUS_ID; of a GPU in MIG mode it means the first instance, as
    CUDA uses no more than one. The beginning of a UUID will do.
    """
    gpus = _in_order(sample)
    value = environ.get(_VISIBLE)
    if value is None:
        return gpus, []
    entries = [entry.strip() for entry in value.split(",")]
    visible: list[str] = []
    for place, entry in enumerate(entries):
        gpu = _named(entry, gpus, sample)
        if gpu is None:
            rest = [left for left in entries[place:] if left]
            meant_none = not place and entry in ("", "-1", "NoDevFiles")
            unread = [] if meant_none or not rest else [f"{_VISIBLE}={value}: nothing from {entry!r} on is visible"]
            return visible, unread
        if gpu in visible:
            return [], [f"{_VISIBLE}={value} repeats a GPU: then CUDA shows none at all"]
        visible.append(gpu)
    warnings = []
    if len(gpus) > 1 and entries[0].isdigit() and environ.get(_ORDER) != "PCI_BUS_ID":
        warnings.append(
            f"{_VISIBLE}={value}: the numbers are taken in the order of the PCI bus; CUDA's own may be another"
        )
    return visible, warnings


def gpu_offload_possible(traits: BackendTraits, environ: Mapping[str, str]) -> bool:
    """Whether the installed library of a backend was built for any GPU. It is looked at and not imported: that takes long,
    and a GPU library in the front would hold the driver.
    """
    spec = importlib.util.find_spec(traits.module) if traits.offloads else None
    if spec is None:
        return False
    package = [Path(folder) / "lib" for folder in spec.submodule_search_locations or ()]
    override = environ.get(traits.module_variable)
    return has_gpu_library([*package, *([Path(override)] if override else [])])


def has_gpu_library(folders: Iterable[Path]) -> bool:
    """Whether one of ``folders`` has a ggml backend for a GPU (``libggml-cuda.so``, ``ggml-vulkan.dll``, …)."""
    names = {file.name.removeprefix("lib") for folder in folders if folder.is_dir() for file in folder.iterdir()}
    beginnings = tuple(f"ggml-{library}{end}" for library in _GPU_LIBRARIES for end in (".", "-"))
    return any(name.startswith(beginnings) for name in names)


def _in_order(sample: Sample) -> list[str]:
    """All GPUs and instances by the number of the GPU; who has no number comes last."""
    gpus = [(device, seen) for device, seen in sample.devices.items() if seen.kind != "host"]
    return [device for device, _ in sorted(gpus, key=lambda item: (item[1].index is None, item[1].index or 0))]


def _named(entry: str, gpus: Sequence[str], sample: Sample) -> str | None:
    if entry.startswith(_BY_UUID):
        return _beginning_with(entry, gpus)
    if not entry.isascii() or not entry.isdigit():
        return None
    number = int(entry[:9])
    return next((gpu for gpu in gpus if sample.devices[gpu].index == number), None)


def _beginning_with(name: str, gpus: Iterable[str]) -> str | None:
    """The one GPU whose UUID begins so. None: there is none, or there are several."""
    if not name.startswith(_BY_UUID):
        return None
    found = [gpu for gpu in gpus if gpu.startswith(name)]
    return found[0] if len(found) == 1 else None


def _list(devices: Iterable[str]) -> str:
    return ", ".join(devices) or "none"
