"""The `!fake {…}` line of a prompt: what the fake backend shall do with that one request."""

from __future__ import annotations

import signal as signals
from typing import Annotated, Final, Literal

import msgspec

from slimproc.engines.fake.vocabulary import END_OF_TURN
from slimproc.errors import InvalidRequest

_MARK: Final = "!fake "
_LONGEST_LINE: Final = 1 << 20
"""Characters. Longer lines are refused before they are parsed."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
Position = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
"""Of a token of the answer, from 1."""


class RawBytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token that is not a whole number of characters: ``{"hex": "f09f"}``."""

    hex: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-fA-F]{2})*$")]


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request's script; the defaults are a request without one. Times in seconds."""

    tokens: Annotated[list[str | RawBytes], msgspec.Meta(max_length=65_536)] | None = None
    """The answer; without it and without ``echo``, ` tok0`, ` tok1`, … without end."""
    repeat: Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)] = 1
    """How many times ``tokens`` (or the echo) is given."""
    token_latency: Seconds | None = None
    """Between two tokens; None: the model's."""
    prefill_steps: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    prefill_latency: Seconds = 0.0
    """Of each prefill step."""
    die_at: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] | None = None
    """The engine sends itself ``signal`` just before this token; 0: before the request has joined the batch."""
    signal: Annotated[int, msgspec.Meta(ge=1, le=64)] = int(signals.SIGKILL)
    hang_at: Position | None = None
    """The step that should make this token never returns."""
    spin: Position | None = None
    """Instead of this token and of all after it, the engine steps for ever and this sequence gets nothing."""
    error_at: Position | None = None
    """The sequence fails instead of this token."""
    logprob: Annotated[float, msgspec.Meta(le=0)] | Literal["-inf"] | None = None
    """Of every token, where log probabilities are asked for; None: 0. JSON has no word for ``-inf`` but a string."""
    echo: bool = False
    """The tokens are the final prompt text, exactly as it reached the engine."""


_decode = msgspec.json.Decoder(Script).decode
_NO_SCRIPT: Final = Script()


def parse(prompt: str) -> Script:
    """The script in ``prompt``: its last ``!fake`` line, so that in a chat the newest message decides.

    In a rendered chat the line may carry the end-of-turn token that the template put behind it. Raises InvalidRequest.
    """
    line = _last_line(prompt)
    if line is None:
        return _NO_SCRIPT
    if len(line) > _LONGEST_LINE:
        raise InvalidRequest(f"the !fake script is longer than {_LONGEST_LINE} characters", param="prompt")
    try:
        script = _decode(line.strip().removesuffix(END_OF_TURN))
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"bad !fake script: {error}", param="prompt") from None
    _check(script)
    return script


def _last_line(prompt: str) -> str | None:
    at = prompt.rfind("\n" + _MARK) + 1
    if at == 0 and not prompt.startswith(_MARK):
        return None
    end = prompt.find("\n", at)
    return prompt[at + len(_MARK) : None if end < 0 else end]


def _check(script: Script) -> None:
    """What the types cannot say: keys that would be ignored without another one are mistakes."""
    answer = script.tokens is not None or script.echo
    for wrong, problem in (
        (script.tokens is not None and script.echo, "tokens and echo exclude each other"),
        (script.repeat != 1 and not answer, "repeat needs tokens or echo"),
        (script.prefill_latency > 0 and not script.prefill_steps, "prefill_latency needs prefill_steps"),
        (script.signal != signals.SIGKILL and script.die_at is None, "signal needs die_at"),
    ):
        if wrong:
            raise InvalidRequest(f"bad !fake script: {problem}", param="prompt")
