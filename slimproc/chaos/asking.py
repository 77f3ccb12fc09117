"""The bytes of a request, and what its answer has to say."""

from __future__ import annotations

import json
import random
from typing import Any, Final

from slimproc.chaos.schedule import Ask

_PATHS: Final = {"completion": "/v1/completions", "chat": "/v1/chat/completions", "embedding": "/v1/embeddings"}
_BAD: Final = (
    b"",
    b"{",
    b"[]",
    b'{"model": 5}',
    b"\xff\xfe{}",
    b'{"prompt": "hi", "max_tokens": -1}',
    b'{"prompt": "hi", "max_tokens": 1e400}',
    b'{"prompt": ["a", 5]}',
    b'{"model": "there is none such", "prompt": "hi"}',
    b"[" * 20_000,
)


def request_of(ask: Ask, host: str) -> bytes:
    """The whole request; the server closes the connection after its answer, so that nothing more can be said on it."""
    path = f"/infer?model={ask.model}" if ask.kind == "infer" else _PATHS.get(ask.kind, "/v1/completions")
    body = _bad_body(ask) if ask.kind == "bad" else json.dumps(_body(ask)).encode()
    head = [
        f"POST {path} HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        f"X-Request-Id: {ask.id}",
        "Connection: close",
    ]
    if ask.timeout is not None:
        head.append(f"X-Request-Timeout: {ask.timeout}")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def wanted_text(ask: Ask) -> str | None:
    """The text of every choice, when nothing goes wrong; None where nobody can know it."""
    if not ask.scripted:
        return None
    return "".join((_pieces(ask) * ask.repeat)[: ask.max_tokens])


def whole_text(ask: Ask) -> str:
    return "".join(_pieces(ask)) * ask.repeat


def _pieces(ask: Ask) -> list[str]:
    """No other request has one of them, so that a token that went astray is known."""
    return [f"<{ask.id}:{place}>" for place in range(ask.tokens)]


def _body(ask: Ask) -> dict[str, Any]:
    if ask.kind == "embedding":
        return {"model": ask.model, "input": [_prompt(ask)] * ask.n}
    fields: dict[str, Any] = {"model": ask.model, "max_tokens": ask.max_tokens, "stream": ask.stream}
    if ask.n > 1:
        fields["n"] = ask.n
    if ask.kind == "completion":
        return fields | {"prompt": _prompt(ask)}
    return fields | {"messages": [{"role": "user", "content": _prompt(ask)}]}


def _prompt(ask: Ask) -> str:
    text = " ".join(["word", *(f"word{place}" for place in range(ask.words))])
    if not ask.scripted:
        return text
    script: dict[str, Any] = {"tokens": _pieces(ask), "token_latency": ask.latency}
    if ask.repeat > 1:
        script["repeat"] = ask.repeat
    if ask.trouble:
        script[ask.trouble] = ask.at
    if ask.trouble == "die_at":
        script["signal"] = ask.signal
    return f"{text}\n!fake {json.dumps(script)}"


def _bad_body(ask: Ask) -> bytes:
    return random.Random(ask.id).choice(_BAD)  # noqa: S311 - a schedule, no secret
