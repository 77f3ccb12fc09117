"""What the probe and the front write to each other: one JSON object a line. The front believes no line it has not checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from slimproc.residency.views import HOST, DeviceSample

LONGEST: Final = 1 << 18
"""Bytes of a line, either way: 64 devices with a thousand processes each would not fill it."""
ABSENT: Final = "absent"
"""What is said of the NVIDIA driver where there is none."""
EXIT_ANEW: Final = 3
"""The probe's exit status when only a fresh process can find out more."""

_MOST_DEVICES: Final = 256
_MOST_BYTES: Final = 1 << 56
_LONGEST_TEXT: Final = 300


class Watch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From the front: the leaders of our process groups, whose bytes are to be told apart."""

    leaders: list[int]


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From the probe: one sample."""

    taken: float
    devices: dict[str, DeviceSample]
    driver: str = ""
    """Why NVML as a whole says nothing: ``absent`` (there is no GPU), or the fault of every GPU. Empty while it works."""
    unnamed: dict[int, str] = {}
    """GPUs, by number, that did not even tell their UUID, and what is the matter with them."""


class BadLine(ValueError):
    """What the probe wrote is no sample."""


_decode_line = msgspec.json.Decoder(Line).decode
_decode_watch = msgspec.json.Decoder(Watch).decode
_encode = msgspec.json.Encoder().encode


def encode(message: Line | Watch) -> bytes:
    return _encode(message) + b"\n"


def watch_line(leaders: Iterable[int]) -> bytes:
    return encode(Watch(sorted(leaders)))


def decode_watch(line: bytes) -> frozenset[int]:
    """Raises msgspec.MsgspecError: the front is wrong, and that is a bug."""
    return frozenset(_decode_watch(line).leaders)


def decode_line(line: bytes, *, now: float) -> Line:
    """Raises BadLine, which says why."""
    try:
        decoded = _decode_line(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine(str(error)) from None
    if not 0 <= decoded.taken <= now:
        raise BadLine("it was taken in the future")
    if HOST not in decoded.devices or len(decoded.devices) > _MOST_DEVICES:
        raise BadLine(f"it is about {len(decoded.devices)} devices, or not about the host")
    for device, sample in decoded.devices.items():
        _check(device, sample)
    if max(map(len, (decoded.driver, *decoded.unnamed.values()))) > _LONGEST_TEXT:
        raise BadLine("a fault is too long")
    return decoded


def _check(device: str, sample: DeviceSample) -> None:
    if (device == HOST) != (sample.kind == "host"):
        raise BadLine(f"{device[:80]!r} is said to be a {sample.kind}")
    numbers = [sample.total, sample.free]
    for table in (sample.attributed or {}, sample.mapped):
        numbers += table.keys()
        numbers += table.values()
    if min(numbers) < 0 or max(numbers) > _MOST_BYTES:
        raise BadLine(f"{device[:80]!r} has an impossible number of bytes")
    if sample.free > sample.total:
        raise BadLine(f"{device[:80]!r} has more bytes free than it has")
    if (
        not device
        or not device.isascii()
        or not device.isprintable()
        or max(map(len, (device, sample.name, sample.fault))) > _LONGEST_TEXT
    ):
        raise BadLine("a name is too long, or not one")


def clip(text: str) -> str:
    """A text from outside as a line may carry it."""
    return text[:_LONGEST_TEXT]
