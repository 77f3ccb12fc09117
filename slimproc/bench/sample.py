"""Sample: what one request came to, as a row of the raw data; and how an ``Answer`` is read for it."""

from __future__ import annotations

import re
from array import array
from typing import Any, Final

import msgspec

from slimproc.bench.exchange import SEAMS, Answer
from slimproc.bench.quantiles import weighted_quantile

OK: Final = "ok"
REFUSED: Final = "refused"
CANCELLED: Final = "cancelled"
ERROR: Final = "error"
_REFUSALS: Final = (429, 503, 529)
_EVENT: Final = re.compile(rb"^data:[ ]?(.*?)\r?$", re.MULTILINE)
_TEXTS: Final = ("content", "reasoning", "reasoning_content", "text")


class Sample(msgspec.Struct, kw_only=True):
    """Seconds, from the request's intended start; ``start`` and ``late`` place that in the run. None: there is none."""

    number: int
    start: float
    """The intended one, from the start of the run."""
    late: float = 0.0
    """From it until the request was sent; a connection may have had to be made."""
    outcome: str = ERROR
    status: int = 0
    ttft: float | None = None
    itl_mean: float | None = None
    itl_p50: float | None = None
    itl_p90: float | None = None
    itl_p99: float | None = None
    itl_max: float | None = None
    latency: float = 0.0
    tokens: int = 0
    tokens_by: str = ""
    """``usage`` or ``events``."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    events: int = 0
    kind: str = ""
    """Of an error or a refusal; few enough to be counted by."""
    detail: str = ""
    gaps: tuple[array[float], array[int]] | None = None
    """The gap before each read's first token, and the tokens of that read; the others have none before them."""


class _Seen(msgspec.Struct):
    """What the end of a stream, or a whole answer, says."""

    done: bool = False
    finished: bool = False
    without_text: int = 0
    """Events after the last token's."""
    usage: dict[str, Any] | None = None
    error: Any = None
    tokens: int = 0


def read(answer: Answer, *, number: int, intended: float, began: float, stream: bool) -> Sample:
    """``intended`` and ``began`` (of the run) are instants of ``perf_counter``."""
    sample = Sample(
        number=number,
        start=intended - began,
        late=max(0.0, answer.sent - intended),
        status=answer.head.status,
        latency=answer.ended - intended,
        events=answer.events,
    )
    if answer.first:
        sample.ttft = answer.first - intended
    if answer.head.status in _REFUSALS and not answer.fault:
        sample.outcome, sample.kind, sample.detail = REFUSED, f"HTTP {answer.head.status}", _message(answer.body)
    elif answer.head.status and answer.head.status != 200 and not answer.fault:
        sample.kind, sample.detail = f"HTTP {answer.head.status}", _message(answer.body)
    elif answer.streamed:
        _read_stream(answer, sample)
    elif answer.fault:
        sample.kind, sample.detail = _kind(answer.fault), answer.fault
    elif stream:
        sample.kind = "not SSE"
        sample.detail = f"a stream was asked for, and {answer.head.content_type or 'something without a type'} came"
    else:
        _read_whole(answer, sample)
    return sample


def _read_stream(answer: Answer, sample: Sample) -> None:
    seen = _look_at_end(answer.body)
    if answer.first:
        trailing = 0 if answer.left or answer.fault else seen.without_text
        _drop_trailing(answer, trailing)
        sample.tokens, sample.tokens_by = sum(answer.counts), "events"
        sample.gaps = (answer.gaps, answer.counts)
    _take_usage(sample, seen.usage)
    if answer.left:
        sample.outcome = CANCELLED
    elif answer.fault:
        sample.kind, sample.detail = _kind(answer.fault), f"{answer.fault}, after {answer.events} events"
    elif seen.error is not None:
        sample.kind, sample.detail = "error event", _words(seen.error)
    elif not answer.events:
        sample.kind, sample.detail = "no events", "the stream ended without an event"
    elif not seen.done and not seen.finished:
        sample.kind = "unfinished"
        sample.detail = f"the stream ended after {answer.events} events, without a finish reason or [DONE]"
    else:
        sample.outcome = OK


def _read_whole(answer: Answer, sample: Sample) -> None:
    try:
        body = msgspec.json.decode(answer.body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        body = None
    if not isinstance(body, dict) or not isinstance(body.get("choices"), list):
        sample.kind, sample.detail = "malformed", f"no completion: {_excerpt(answer.body)}"
        return
    sample.outcome = OK
    _take_usage(sample, body.get("usage"))


def _take_usage(sample: Sample, usage: Any) -> None:
    """What a server says of itself is believed where it is a plain count."""
    if not isinstance(usage, dict):
        return
    sample.prompt_tokens = _count(usage.get("prompt_tokens"))
    details = usage.get("prompt_tokens_details")
    sample.cached_tokens = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    tokens = _count(usage.get("completion_tokens"))
    if tokens is not None:
        sample.tokens, sample.tokens_by = tokens, "usage"


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else None


def _look_at_end(body: bytes) -> _Seen:
    seen = _Seen()
    for found in _EVENT.finditer(SEAMS.sub(b"", body)):
        data = found[1]
        if data == b"[DONE]":
            seen.done = True
            seen.without_text += 1
            continue
        try:
            event = msgspec.json.decode(data)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            event = None  # cut where the kept end begins, or not ours to understand
        if not isinstance(event, dict):
            seen.without_text = 0
            continue
        seen.error = event.get("error") if event.get("error") is not None else seen.error
        seen.usage = event.get("usage") or seen.usage
        choices = event.get("choices")
        choices = [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
        seen.finished |= any(choice.get("finish_reason") for choice in choices)
        seen.without_text = 0 if any(map(_has_text, choices)) else seen.without_text + 1
    return seen


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    inner = delta if isinstance(delta, dict) else choice
    return any(inner.get(name) for name in _TEXTS) or bool(inner.get("tool_calls"))


def _drop_trailing(answer: Answer, trailing: int) -> None:
    """A finish reason, usage and ``[DONE]`` are no tokens: their time is no time between tokens."""
    while trailing and answer.counts:
        taken = min(trailing, answer.counts[-1])
        trailing -= taken
        answer.counts[-1] -= taken
        if not answer.counts[-1] and len(answer.counts) > 1:
            answer.counts.pop()
            answer.gaps.pop()
        elif not answer.counts[-1]:
            break


def between_tokens(sample: Sample) -> None:
    """Fill in the times between tokens, which is left until nothing is being measured any more. Tokens that came
    together have no time between them: that is what a client sees.
    """
    if sample.gaps is None:
        return
    gaps, between = sample.gaps[0][1:], sum(sample.gaps[1]) - 1
    if between < 1:
        return
    pairs = [(0.0, between - len(gaps)), *((gap, 1) for gap in sorted(gaps))]
    sample.itl_mean = sum(gaps) / between
    sample.itl_p50, sample.itl_p90, sample.itl_p99, sample.itl_max = (
        weighted_quantile(pairs, share) for share in (0.5, 0.9, 0.99, 1.0)
    )


def _kind(fault: str) -> str:
    """``connect: connection refused``: the first part of a fault is what it is counted by."""
    return fault.partition(":")[0]


def _message(body: bytes) -> str:
    try:
        return _words(msgspec.json.decode(body)["error"])
    except (msgspec.MsgspecError, KeyError, TypeError, RecursionError, UnicodeDecodeError):
        return _excerpt(body)


def _words(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return " ".join("".join(c if c.isprintable() else " " for c in str(message)[:300]).split())


def _excerpt(body: bytes) -> str:
    return repr(body[:80].decode("utf-8", "replace"))
