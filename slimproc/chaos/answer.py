"""What an answer's bytes say: taken apart without mercy, so that one byte too many is seen."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

from slimproc.bench.head import Head, HeadError, parse_head

_DONE: Final = "[DONE]"


class Malformed(Exception):
    """The answer is none, or goes on after its end."""


@dataclass
class Answer:
    """``end``: ``ok``, ``error`` (with its ``code``), or empty when it broke off before it had an end."""

    head: Head = field(default_factory=Head)
    end: str = ""
    code: str = ""
    texts: dict[int, str] = field(default_factory=dict)
    """By choice."""
    finishes: dict[int, str] = field(default_factory=dict)
    vectors: int = 0


def read_answer(data: bytes, *, whole: bool) -> Answer:
    """``whole``: the server said everything that it wanted to. Raises Malformed."""
    head, found, body = data.partition(b"\r\n\r\n")
    answer = Answer()
    if not found:
        if whole and data:
            raise Malformed("the connection ended within the head of the answer")
        return answer
    try:
        answer.head = parse_head(head)
    except HeadError as error:
        raise Malformed(str(error)) from None
    content, complete = _content(answer.head, body)
    if answer.head.events:
        _read_events(answer, content, complete=complete)
    elif complete:
        _read_body(answer, content)
    return answer


def _content(head: Head, body: bytes) -> tuple[bytes, bool]:
    if not head.chunked:
        if head.length is None:
            raise Malformed("an answer to HTTP/1.1 has neither chunks nor a length")
        if len(body) > head.length:
            raise Malformed(f"{len(body) - head.length} bytes after the end of the answer")
        return body, len(body) == head.length
    parts: list[bytes] = []
    while True:
        size, found, rest = body.partition(b"\r\n")
        if not found:
            return b"".join(parts), False
        try:
            length = int(size, 16)
        except ValueError:
            raise Malformed(f"no size of a chunk: {size[:40]!r}") from None
        if length == 0:
            if len(rest) > 2 or not b"\r\n".startswith(rest):
                raise Malformed(f"bytes after the last chunk: {rest[:40]!r}")
            return b"".join(parts), rest == b"\r\n"
        parts.append(rest[:length])
        if len(rest) < length + 2:
            return b"".join(parts), False
        if rest[length : length + 2] != b"\r\n":
            raise Malformed("a chunk is longer than it says")
        body = rest[length + 2 :]


def _read_events(answer: Answer, content: bytes, *, complete: bool) -> None:
    error, done = "", False
    blocks = content.split(b"\n\n")
    if complete and blocks[-1]:
        raise Malformed("the last event has no end")
    for block in blocks[:-1]:
        if done:
            raise Malformed(f"an event after [DONE]: {block[:60]!r}")
        if block.startswith(b":"):
            continue
        if not block.startswith(b"data: "):
            raise Malformed(f"no event: {block[:60]!r}")
        text = block[6:].decode("utf-8", "replace")
        if text == _DONE:
            done = True
            continue
        if error:
            raise Malformed(f"an event after an error: {text[:60]!r}")
        event = _json(text)
        error = _code(event)
        if not error:
            _take(answer, event)
    if complete and not done:
        raise Malformed("a stream ended properly, but without [DONE]")
    if done:
        answer.end, answer.code = ("error", error) if error else ("ok", "")


def _read_body(answer: Answer, content: bytes) -> None:
    if not content and answer.head.status >= 400:
        raise Malformed("an error without a body")
    document = _json(content.decode("utf-8", "replace"))
    if answer.head.status != 200:
        answer.end, answer.code = "error", _code(document)
        if not answer.code:
            raise Malformed(f"status {answer.head.status} without an error object")
        return
    answer.end = "ok"
    if isinstance(document.get("data"), list):
        answer.vectors = len(document["data"])
    else:
        _take(answer, document)


def _take(answer: Answer, document: dict[str, Any]) -> None:
    """The choices of an event or of a joined answer."""
    for choice in document.get("choices", ()):
        index = choice["index"]
        said = choice.get("text")
        if said is None:
            said = (choice.get("delta") or choice.get("message") or {}).get("content")
        if said and index in answer.finishes:
            raise Malformed(f"text of choice {index} after its end")
        answer.texts[index] = answer.texts.get(index, "") + (said or "")
        if choice.get("finish_reason") is not None:
            if index in answer.finishes:
                raise Malformed(f"choice {index} ends twice")
            answer.finishes[index] = choice["finish_reason"]


def _code(document: dict[str, Any]) -> str:
    error = document.get("error")
    if isinstance(error, dict):
        return str(error.get("code"))
    return str(document.get("code")) if error is not None else ""


def _json(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        raise Malformed(f"no JSON: {text[:60]!r}") from None
    if not isinstance(document, dict):
        raise Malformed(f"no JSON object: {text[:60]!r}")
    return document
