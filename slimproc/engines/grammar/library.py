"""llguidance, wrapped: tokenizers, the limits of its work, its notations, and what its refusals sound like."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, cast

import llguidance
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from slimproc.engines.grammar.matcher import reason

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

    from slimproc.engines.grammar.vocabulary import GrammarVocabulary
    from slimproc.request import GrammarSpec

_LIMITS = LLParserLimits(step_max_items=20_000, max_lexer_states=50_000, verbose_errors=False)
"""The library's own are 50,000 and 250,000: seconds of one step, and half a gigabyte of lexer states."""
_WHITESPACE = r"([ ]|\n{1,2}[ \t]{0,20})?"
"""Between JSON's tokens: enough for any usual layout. Without a bound, small models go on with blanks for ever."""
_SCHEMA_DEFAULTS: JsonCompileOptions = {"whitespace_pattern": _WHITESPACE}
_SCHEMA_OVERRIDES: JsonCompileOptions = {"lenient": False}
"""A keyword that is not implemented is refused, whatever the schema itself says: no answer is looser than asked for."""


class GrammarRefusedError(Exception):
    """A grammar that cannot be compiled; the message says why, in one line."""


class _Tokens:
    """What LLTokenizer reads of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._own = vocabulary.tokenize
        self._ends = frozenset(vocabulary.ends)
        self.eos_token_id = vocabulary.ends[0]
        # Empty tokens and ends get names that no text can spell, and are marked as special.
        self.tokens = [
            piece if piece and token not in self._ends else b"<|%d|>" % token
            for token, piece in enumerate(vocabulary.tokens)
        ]
        self.special_token_ids = [
            token for token, piece in enumerate(vocabulary.tokens) if not piece or token in self._ends
        ]
        self.greedy: LLTokenizer | None = None

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        if self._own is not None:
            tokens = self._own(data.decode("utf-8", "replace"))
            if b"".join([self.tokens[token] for token in tokens]) == data:
                return tokens
        return [] if self.greedy is None else self.greedy.greedy_tokenize(data.decode("utf-8", "replace"))


def make_tokenizer(vocabulary: GrammarVocabulary) -> LLTokenizer:
    """Takes 0.2 s for 49,152 tokens, in which nothing else in this process runs."""
    tokens = _Tokens(vocabulary)
    tokens.greedy = LLTokenizer(
        cast("TokenizerWrapper", tokens), n_vocab=len(tokens.tokens), eos_token=list(vocabulary.ends)
    )
    return tokens.greedy


def translate(spec: GrammarSpec) -> str:
    """The spec in llguidance's own notation. Raises GrammarRefusedError. A GBNF grammar of 64 KiB can take seconds."""
    try:
        match spec.kind:
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(spec.text, _SCHEMA_DEFAULTS, _SCHEMA_OVERRIDES)
            case "regex":
                return LLMatcher.grammar_from_regex(spec.text)
            case "choice":
                return LLMatcher.grammar_from_regex("|".join(map(_literally, json.loads(spec.text))))
            case "grammar":
                return llguidance.grammar_from("grammar", spec.text)
    except RecursionError:
        raise GrammarRefusedError("it is nested too deeply") from None
    except ValueError as error:
        raise GrammarRefusedError(reason(str(error))) from None


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher before its first token. Lets other threads run meanwhile. Raises GrammarRefusedError."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise GrammarRefusedError(reason(matcher.get_error()))
    return matcher


def _literally(text: str) -> str:
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)
