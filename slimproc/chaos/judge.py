"""Whether each answer is one that its request may have: exactly one end, its own tokens in order, refusals at once."""

from __future__ import annotations

from typing import Final

from slimproc.chaos.answer import Answer, Malformed, read_answer
from slimproc.chaos.asking import wanted_text, whole_text
from slimproc.chaos.exchange import Heard
from slimproc.chaos.schedule import LONG
from slimproc.chaos.verdict import Told, Violation

REFUSED_WITHIN: Final = 10.0
"""Seconds: generous, since client and server share the machine with everything that is being broken."""
_FULL: Final = ("overloaded", "QUEUE_FULL")
_NEVER: Final = ("internal_error",)


def judge(heard: Heard) -> tuple[Told, list[Violation]]:
    """What the client was told, and what is wrong with it."""
    ask = heard.ask
    told = Told(ask.id, ask.model, "broken", sent=heard.sent, ended=heard.ended)
    try:
        answer = read_answer(heard.data, whole=heard.how == "closed")
    except Malformed as error:
        return told, [Violation("one end", str(error), ask.id)]
    told.status, told.code = answer.head.status, answer.code
    told.end = answer.end or ("left" if heard.how == "left" else "broken")
    problems = _tokens(heard, answer)
    if told.end == "broken":
        problems += _why_broken(heard)
    elif told.end == "ok":
        problems += _completeness(heard, answer)
    elif told.end == "error":
        problems += _error(heard, answer)
    return told, [Violation(rule, what, ask.id) for rule, what in problems]


def _why_broken(heard: Heard) -> list[tuple[str, str]]:
    if heard.how == "lost":
        return [("one end", f"no end came in {heard.ended - heard.sent:.0f} s, after {len(heard.data)} bytes")]
    if heard.ask.slow and heard.data:
        return []  # who does not read is dropped
    return [("one end", f"{heard.how} without an end, after {len(heard.data)} bytes")]


def _tokens(heard: Heard, answer: Answer) -> list[tuple[str, str]]:
    wanted = wanted_text(heard.ask)
    if wanted is None:
        return []
    return [
        ("own tokens in order", f"choice {index}: {text[:200]!r} does not begin {wanted[:200]!r}")
        for index, text in answer.texts.items()
        if not wanted.startswith(text)
    ]


def _completeness(heard: Heard, answer: Answer) -> list[tuple[str, str]]:
    ask = heard.ask
    if ask.kind == "bad":
        return [("bad bodies are refused", "it was answered")]
    if ask.kind == "embedding":
        wrong = answer.vectors != ask.n
        return [("whole answers", f"{answer.vectors} vectors instead of {ask.n}")] if wrong else []
    if set(answer.finishes) != set(range(ask.n)):
        return [("one end", f"choices {sorted(answer.finishes)} have an end, and {ask.n} were asked for")]
    wanted = wanted_text(ask)
    if wanted is None:
        return []
    problems: list[tuple[str, str]] = []
    finish = "length" if len(wanted) < len(whole_text(ask)) or ask.max_tokens == ask.tokens else "stop"
    for index, text in answer.texts.items():
        if ask.repeat > 1 and answer.finishes[index] == "length":
            continue  # as much as its context had room for
        if text != wanted:
            problems.append(("whole answers", f"choice {index} has {len(text)} of {len(wanted)} characters"))
        if answer.finishes[index] != finish and ask.max_tokens != ask.tokens:
            problems.append(("whole answers", f"choice {index} ended by {answer.finishes[index]}, not {finish}"))
    return problems


def _error(heard: Heard, answer: Answer) -> list[tuple[str, str]]:
    ask, status = heard.ask, answer.head.status
    problems: list[tuple[str, str]] = []
    if answer.code in _NEVER:
        problems.append(("no bug of ours", f"{status} {answer.code}"))
    if ask.kind == "bad" and not 400 <= status < 500:
        problems.append(("bad bodies are refused", f"{status} {answer.code}"))
    too_long = answer.code == "context_length_exceeded" or (ask.kind == "infer" and answer.code == "BAD_REQUEST")
    if ask.kind != "bad" and 400 <= status < 500 and answer.code not in _FULL and not (too_long and ask.words >= LONG):
        problems.append(("good requests are not called bad", f"{status} {answer.code}"))
    if answer.code in _FULL:
        seconds = heard.first - heard.sent - ask.slow
        if seconds > REFUSED_WITHIN:
            problems.append(("refusals are immediate", f"{answer.code} after {seconds:.1f} s"))
        if not answer.head.retry_after.isdigit() or not 1 <= int(answer.head.retry_after) <= 60:
            problems.append(("refusals say when to come back", f"Retry-After is {answer.head.retry_after!r}"))
    return problems
