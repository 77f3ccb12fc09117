"""How OpenAI's two generation routes spell log probabilities: each in its own layout, both strict JSON."""

from __future__ import annotations

from typing import Any

from slimproc.ipc.wire import Logprob


def chat_logprobs(tokens: list[Logprob]) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat. A token that is no whole character shows U+FFFD; ``bytes`` has what it is."""
    content = [
        {**_token(token.piece, token.logprob), "top_logprobs": [_token(*alternative) for alternative in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _token(piece: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": _text(piece), "logprob": logprob, "bytes": list(piece)}


def legacy_logprobs(tokens: list[Logprob], alternatives: int) -> dict[str, Any]:
    """``choices[].logprobs`` of a completion. ``alternatives``: how many were asked for; of 0 there is no list."""
    return {
        "tokens": [_text(token.piece) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_by_text(token) for token in tokens] if alternatives else None,
        "text_offset": [token.offset for token in tokens],
    }


def _by_text(token: Logprob) -> dict[str, float] | None:
    """The alternatives and the token itself, as OpenAI has it. Of those that show the same text the likeliest counts."""
    if token.logprob is None:
        return None
    found: dict[str, float] = {}
    for piece, logprob in (*token.top, (token.piece, token.logprob)):
        found.setdefault(_text(piece), logprob)
    return found


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")
