"""The fake backend's vocabulary: two consecutive bytes of the UTF-8 text are one token.

Ids 0 to 255 are single bytes (an odd last one), the next 65,536 are pairs, and then come the control tokens. It needs
no files and no state, and detokenizing gives back the very bytes that were tokenized.
"""

from __future__ import annotations

import re
import struct
from typing import Final

from slimproc.errors import InvalidRequest

CONTROL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TURN: Final = "<|im_end|>"
_FIRST_PAIR: Final = 256
_FIRST_CONTROL: Final = _FIRST_PAIR + 65_536
SIZE: Final = _FIRST_CONTROL + len(CONTROL_TOKENS)

_CONTROL_IDS: Final = {text: _FIRST_CONTROL + index for index, text in enumerate(CONTROL_TOKENS)}
_CONTROL_PATTERN: Final = re.compile("|".join(map(re.escape, CONTROL_TOKENS)))


def tokenize(text: str, *, parse_special: bool, literals: list[tuple[int, int]] | None = None) -> list[int]:
    """Token ids of ``text``. A control token's text that touches a span of ``literals`` (start, end; characters) is
    plain text, and so is every one when ``parse_special`` is false.
    """
    if not parse_special:
        return _pairs(text)
    spans = sorted(literals or ())
    tokens: list[int] = []
    done = 0
    span = 0
    for match in _CONTROL_PATTERN.finditer(text):
        start, end = match.span()
        while span < len(spans) and spans[span][1] <= start:
            span += 1
        if span < len(spans) and spans[span][0] < end:
            continue
        tokens += _pairs(text[done:start])
        tokens.append(_CONTROL_IDS[match.group()])
        done = end
    tokens += _pairs(text[done:])
    return tokens


def detokenize(tokens: list[int]) -> bytes:
    """The bytes of ``tokens``. Raises InvalidRequest for an id that is not in the vocabulary."""
    return b"".join(pieces(tokens))


def pieces(tokens: list[int]) -> list[bytes]:
    """The bytes of each token. Raises InvalidRequest for an id that is not in the vocabulary."""
    return list(map(_piece, tokens))


def _pairs(text: str) -> list[int]:
    data = text.encode()
    pairs, odd = divmod(len(data), 2)
    tokens = [_FIRST_PAIR + pair for pair in struct.unpack_from(f">{pairs}H", data)]
    if odd:
        tokens.append(data[-1])
    return tokens


def _piece(token: int) -> bytes:
    if 0 <= token < _FIRST_PAIR:
        return token.to_bytes(1, "big")
    if _FIRST_PAIR <= token < _FIRST_CONTROL:
        return (token - _FIRST_PAIR).to_bytes(2, "big")
    if _FIRST_CONTROL <= token < SIZE:
        return CONTROL_TOKENS[token - _FIRST_CONTROL].encode()
    raise InvalidRequest(f"token id {token} is not in this model's vocabulary (0 to {SIZE - 1})", param="tokens")
