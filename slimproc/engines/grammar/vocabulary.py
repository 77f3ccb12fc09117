"""GrammarVocabulary: what a compiler of grammars must know of a model's tokens; the same for every backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class GrammarVocabulary:
    """``len(tokens)`` is the width of the model's rows of logits: ids without a token are there as ``b""``."""

    tokens: list[bytes]
    """By id, exactly the bytes that the token adds to an answer. One without any (a control token) is never allowed."""
    ends: list[int]
    """The tokens by which the model ends its text, at least one: allowed where the grammar is complete."""
    tokenize: Callable[[str], list[int]] | None = None
    """The model's own way to spell a text, without BOS and with control tokens unparsed: where a grammar leaves only
    one text, the model continues with its usual tokens. None, or where its bytes are not the text's: the longest that
    fit. Called by the engine's thread."""
