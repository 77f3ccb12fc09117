"""Vocabulary: text to token ids and back, and which tokens mean something special."""

from __future__ import annotations

import contextlib
import ctypes
import re
import string
from typing import Any

import numpy as np

from slimproc.engines.grammar.vocabulary import GrammarVocabulary
from slimproc.engines.llama_cpp.library import lib
from slimproc.engines.llama_cpp.tokenizing import CUTS, NativeTokenizer
from slimproc.errors import InvalidRequest

_PIECE_BYTES = 256
_LONGEST_PIECE = 1 << 14
_LEADS = ("\n", "\x01")
"""Texts to put before another, one of which no vocabulary melts into what comes after it."""


class Vocabulary:
    """One model's vocabulary. It lives as long as its model: no method may be called after that."""

    def __init__(self, handle: Any, pre: str = "") -> None:
        """``pre``: how texts are cut into words, as the model's file names it."""
        self._handle = handle
        self.size: int = lib.llama_vocab_n_tokens(handle)
        self._piece_cache: dict[int, bytes] = {}
        self._buffer = ctypes.create_string_buffer(_PIECE_BYTES)
        bos, eos = lib.llama_vocab_bos(handle), lib.llama_vocab_eos(handle)
        self._bos: int | None = bos if self._is_known(bos) else None
        self._adds_bos = bool(lib.llama_vocab_get_add_bos(handle)) and self._bos is not None
        separator = lib.llama_vocab_sep(handle)
        end = eos if self._is_known(eos) else separator
        closing = [end] if lib.llama_vocab_get_add_eos(handle) and self._is_known(end) else []
        between = [separator] if lib.llama_vocab_get_add_sep(handle) and self._is_known(separator) else []
        # BERT's own vocabularies end both texts with the same token once, whatever else their files say.
        bert = lib.llama_vocab_type(handle) == lib.LLAMA_VOCAB_TYPE_WPM and self._is_known(separator)
        self._between_pair, self._after_pair = ([separator], [separator]) if bert else ([*closing, *between], closing)
        self.bos_text = self._text(bos)
        self.eos_text = self._text(eos)
        attributes = [lib.llama_vocab_get_attr(handle, token) for token in range(self.size)]
        self._tokenizer = NativeTokenizer(handle, attributes, pre)
        self._adds_space = self._begins_with_space()
        """SentencePiece vocabularies put a space before a text, which is not the text's own."""
        special = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN
        control = [token for token, attribute in enumerate(attributes) if attribute & special]
        self._cuts = frozenset(token for token, attribute in enumerate(attributes) if attribute & CUTS)
        """Tokens that are looked for before all others: what comes after one begins anew, with a space of its own."""
        self.control_texts = [text for text in map(self._text, control) if text]
        # llama.cpp marks what it takes for an end by its text as CONTROL; only ids named in the file can be others.
        named = {eos, lib.llama_vocab_eot(handle)}
        ends = {
            token for token in {*control, *named} if self._is_known(token) and lib.llama_vocab_is_eog(handle, token)
        }
        self.ends = frozenset(ends)
        """Tokens by which the model ends its text."""
        self.end_ids = np.array(sorted(ends), np.int64)

    def _begins_with_space(self) -> bool:
        for letter in ("x", *string.ascii_letters):
            with contextlib.suppress(InvalidRequest):  # not every vocabulary can spell every letter
                probe = self._tokenize(letter, parse_special=False)
                return bool(probe) and self._piece(probe[0], special=False).startswith(b" ")
        return False

    # --- text to tokens ---------------------------------------------------------------------------------------

    def tokenize(self, text: str, *, add_bos: bool, parse_special: bool) -> list[int]:
        """Token ids. ``add_bos`` puts one BOS in front where the model wants one and the text did not bring it."""
        tokens = self._tokenize(text, parse_special=parse_special)
        return self._with_bos(tokens) if add_bos else tokens

    def least_tokens(self, text: str) -> int:
        """No fewer tokens does ``text`` have; 0 where nothing is known."""
        return self._tokenizer.least_tokens(text)

    def tokenize_spans(self, text: str, literals: list[tuple[int, int]]) -> list[int]:
        """As ``tokenize`` with BOS, but control tokens are not parsed inside the character spans ``literals``.

        The spans must be in order, disjoint and within the text; ``InvalidRequest`` otherwise. Each begins and ends
        where llama.cpp would cut the text itself had it parsed the control token there, so the rest stays as it was.
        """
        parts: list[tuple[str, bool]] = []
        last = 0
        for start, end in literals:
            if not last <= start <= end <= len(text):
                raise InvalidRequest("literal spans must be ordered, disjoint and inside the prompt", param="prompt")
            parts += [(text[last:start], True), (text[start:end], False)]
            last = end
        return self._with_bos(self._joined([*parts, (text[last:], True)]))

    def tokenize_continuation(self, text: str) -> list[int]:
        """Token ids of a text that follows other tokens: no space in front that is not its own, and no control tokens."""
        return self._continue(text, parse_special=False)

    def tokenize_input(self, text: str) -> list[int]:
        """Token ids of a text to embed, between the tokens that the model wants around it; control tokens are text."""
        return self._tokenize(text, parse_special=False, add_special=True)

    def tokenize_pair(self, query: str, document: str, template: str | None) -> list[int]:
        """Token ids of a query and a document to rank: as ``template`` says ({query}, {document}), or else one behind the
        other, with the tokens between them that the model wants. The words of both are text, never control tokens.
        """
        if template is not None:
            words = {"{query}": query, "{document}": document}
            pieces = re.split(r"(\{query\}|\{document\})", template)
            return self._joined([(words.get(piece, piece), piece not in words) for piece in pieces])
        first, second = self._tokenize(query, parse_special=False), self._tokenize(document, parse_special=False)
        return self._with_bos([*first, *self._between_pair, *second, *self._after_pair])

    def _joined(self, parts: list[tuple[str, bool]]) -> list[int]:
        """Tokens of a text in parts, each with whether its control tokens are parsed."""
        tokens: list[int] = []
        for text, parse_special in parts:
            begins = not tokens or tokens[-1] in self._cuts
            tokens += (self._tokenize if begins else self._continue)(text, parse_special=parse_special)
        return tokens

    def _continue(self, text: str, *, parse_special: bool) -> list[int]:
        """As ``_tokenize``, of a text in the middle of another, where no space is put in front."""
        for lead in _LEADS if self._adds_space and text else ():
            # The space goes before the lead instead, and both are cut off again.
            with contextlib.suppress(InvalidRequest):
                before = self._tokenize(lead, parse_special=False)
                tokens = self._tokenize(lead + text, parse_special=parse_special)
                if tokens[: len(before)] == before:
                    return tokens[len(before) :]
        return self._tokenize(text, parse_special=parse_special)

    def _with_bos(self, tokens: list[int]) -> list[int]:
        if self._bos is None or not self._adds_bos or tokens[:1] == [self._bos]:
            return tokens
        return [self._bos, *tokens]

    def _tokenize(self, text: str, *, parse_special: bool, add_special: bool = False) -> list[int]:
        return self._tokenizer.tokens(text, parse_special=parse_special, add_special=add_special)

    # --- tokens to text ---------------------------------------------------------------------------------------

    def piece(self, token: int) -> bytes:
        """The bytes that ``token`` adds to a text; none for a control token."""
        piece = self._piece_cache.get(token)
        if piece is None:
            piece = self._piece_cache[token] = self._piece(token, special=False)
        return piece

    def detokenize(self, tokens: list[int]) -> bytes:
        """The text of ``tokens``, control tokens spelled out. Raises InvalidRequest for an id that does not exist."""
        self.check(tokens, param="tokens")
        return b"".join(self.pieces(tokens)) if tokens else b""

    def spelled(self, token: int) -> bytes:
        """As ``piece``, but a control token is spelled out."""
        return self._piece(token, special=True)

    def pieces(self, tokens: list[int]) -> list[bytes]:
        """What each of ``tokens`` is in their text, control tokens spelled out. There must be at least one."""
        # Not llama_detokenize: for many vocabularies it "cleans up" spaces before punctuation that were in the text.
        pieces = [self._piece(token, special=True) for token in tokens]
        first = 1 if tokens[0] == self._bos and len(tokens) > 1 else 0
        if self._adds_space:
            pieces[first] = pieces[first].removeprefix(b" ")
        return pieces

    def grammar_vocabulary(self) -> GrammarVocabulary:
        """From any thread: 0.1 s of short native calls."""
        buffer = ctypes.create_string_buffer(_LONGEST_PIECE)
        to_piece = lib.llama_token_to_piece
        tokens = []
        for token in range(self.size):
            count = to_piece(self._handle, token, buffer, len(buffer), 0, False)
            tokens.append(buffer.raw[:count] if count > 0 else b"")  # one that is longer is never allowed
        return GrammarVocabulary(tokens, sorted(self.ends), lambda text: self._tokenize(text, parse_special=False))

    def check(self, tokens: list[int], *, param: str) -> None:
        """Raises InvalidRequest if any id is not in the vocabulary: native code indexes arrays with them."""
        if tokens and not (min(tokens) >= 0 and max(tokens) < self.size):
            unknown = next(token for token in tokens if not self._is_known(token))
            raise InvalidRequest(
                f"token id {unknown} is not in this model's vocabulary (0 to {self.size - 1})", param=param
            )

    def _is_known(self, token: int) -> bool:
        return 0 <= token < self.size

    def _text(self, token: int) -> str:
        return self._piece(token, special=True).decode("utf-8", "replace") if self._is_known(token) else ""

    def _piece(self, token: int, *, special: bool) -> bytes:
        count = lib.llama_token_to_piece(self._handle, token, self._buffer, len(self._buffer), 0, special)
        if count < 0:
            self._buffer = ctypes.create_string_buffer(-count)
            count = lib.llama_token_to_piece(self._handle, token, self._buffer, len(self._buffer), 0, special)
        return self._buffer.raw[: max(count, 0)]
