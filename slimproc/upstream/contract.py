"""The control contract: what a model server that lives without us must say of itself, read strictly.

``GET /control/status``, ``POST /control/load`` and ``POST /control/unload`` (both ``{}``) answer 200 with the four
fields of ``Status``, or another status with ``{"error": {"code", "message"}}``. Who says less is somebody else's server.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

_CLIP = 200
"""Characters of a stranger's words that are passed on."""

State = Literal["unloaded", "loading", "ready", "unloading", "failed"]
Residency = Literal["resident", "not_resident", "unknown"]


class ControlError(Exception):
    """A control request came to nothing. ``reason`` is for people."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Unreachable(ControlError):
    """Nobody listens there."""


class NoAnswer(ControlError):
    """Somebody listens, and did not answer in time, or broke off."""


class ContractViolated(ControlError):
    """Whoever answered does not keep the contract: it is not known to be the model's server at all."""


class ControlRefused(ControlError):
    """It said no, in the contract's words. ``code`` is what counts."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{clip(code)}: {clip(message)}" if message else clip(code))
        self.code = code


class LastError(msgspec.Struct, frozen=True):
    code: str
    message: str


class Status(msgspec.Struct, frozen=True):
    """All four must be there. Other fields are the server's own business, save one that contradicts them."""

    state: State
    residency: Residency
    active_requests: Annotated[int, msgspec.Meta(ge=0)]
    last_error: LastError | None
    error: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """A success that is an error as well is neither."""

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    @property
    def unloaded(self) -> bool:
        return self.state == "unloaded"


class _Error(msgspec.Struct, frozen=True):
    code: str
    message: str = ""


class _Refusal(msgspec.Struct, frozen=True):
    error: _Error


_status = msgspec.json.Decoder(Status)
_refusal = msgspec.json.Decoder(_Refusal)


def read(http_status: int, body: bytes) -> Status:
    """What an answer says. Raises ContractViolated or ControlRefused."""
    if http_status != 200:
        raise _refused(http_status, body)
    try:
        status = _status.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ContractViolated(f"it answered no control status: {clip(str(error))}") from None
    contradiction = _contradiction(status)
    if contradiction:
        raise ContractViolated(f"its control status contradicts itself: {contradiction}")
    return status


def _contradiction(status: Status) -> str:
    if status.error is not msgspec.UNSET and bytes(status.error) != b"null":
        return "it is an error as well"
    if status.ready and status.residency != "resident":
        return f"ready, and {status.residency}"
    if status.unloaded and status.residency != "not_resident":
        return f"unloaded, and {status.residency}"
    if status.unloaded and status.active_requests:
        return f"unloaded, and {status.active_requests} requests are active"
    return ""


def _refused(http_status: int, body: bytes) -> ControlError:
    try:
        refusal = _refusal.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ContractViolated(f"it answered {http_status} without the contract's error")
    return ControlRefused(refusal.error.code, refusal.error.message)


def clip(text: str) -> str:
    return text if len(text) <= _CLIP else text[:_CLIP] + "..."
