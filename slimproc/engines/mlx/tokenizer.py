"""Vocabulary: text to token ids and back with the tokenizers library, and which tokens mean something special."""

from __future__ import annotations

import copy
import json
from typing import Any

from slimproc.engines.grammar.vocabulary import GrammarVocabulary
from slimproc.engines.mlx.directory import ModelDirectory
from slimproc.engines.mlx.lengths import LeastTokens
from slimproc.engines.mlx.library import tokenizers
from slimproc.engines.mlx.pieces import PieceDecoder
from slimproc.engines.panics import is_failure
from slimproc.errors import InvalidRequest

_ENDS = frozenset({"<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|endoftext|>"})
"""Control tokens that end a turn or a text by their very name; many a conversion forgets to list them, and then the
model talks on as its own user. llama.cpp goes by the text as well."""


class Vocabulary:
    """One model's vocabulary. ``size``: the ids that the model has rows for, whatever the tokenizer knows."""

    def __init__(self, directory: ModelDirectory) -> None:
        """Raises ValueError, or whatever the tokenizers library does: tokenizer.json is not to be trusted."""
        text = (directory.path / "tokenizer.json").read_text("utf-8")
        description = json.loads(text)
        self.size = 0
        """To be set once the model is loaded, and before anything else is asked."""
        self._whole = _tokenizer(text)
        self._rest = _tokenizer(json.dumps(_without_prefix(description)))
        self._decoder = PieceDecoder(description.get("decoder"))
        self._least = LeastTokens(description)
        added = self._whole.get_added_tokens_decoder()
        self._added: dict[int, str] = {token: item.content for token, item in added.items()}
        self._control = {token for token, item in added.items() if item.special}
        self._pieces: dict[int, bytes] = {}
        self.bos_text, self.eos_text = directory.token_text("bos_token"), directory.token_text("eos_token")
        self._bos: int | None = self._whole.token_to_id(self.bos_text) if self.bos_text else None
        configured = directory.tokenizer_config.get("add_bos_token")
        first = self._whole.encode("", add_special_tokens=True).ids[:1]
        self._adds_bos = configured if isinstance(configured, bool) else first == [self._bos]
        eos = self._whole.token_to_id(self.eos_text) if self.eos_text else None
        ends = {*directory.end_ids, *([] if eos is None else [eos])}
        self.ends = frozenset(ends | {token for token in self._control if self._added[token] in _ENDS})
        """Tokens by which the model ends its text."""

    @property
    def control_texts(self) -> list[str]:
        return [self._added[token] for token in sorted(self._control) if self._added[token]]

    # --- text to tokens ---------------------------------------------------------------------------------------

    def tokenize(self, text: str, *, add_bos: bool, parse_special: bool) -> list[int]:
        """Token ids. ``add_bos`` puts one BOS in front where the model wants one and the text did not bring it."""
        tokens = self._encode(self._whole, text, parse_special=parse_special)
        return self._with_bos(tokens) if add_bos else tokens

    def tokenize_spans(self, text: str, literals: list[tuple[int, int]]) -> list[int]:
        """As ``tokenize`` with BOS, but control tokens are not parsed inside the character spans ``literals``.

        The spans must be in order, disjoint and within the text; ``InvalidRequest`` otherwise.
        """
        tokens: list[int] = []
        last = 0
        for start, end in literals:
            if not last <= start <= end <= len(text):
                raise InvalidRequest("literal spans must be ordered, disjoint and inside the prompt", param="prompt")
            tokens += self._continue(text[last:start], first=last == 0)
            tokens += self._encode(self._whole if start == 0 else self._rest, text[start:end], parse_special=False)
            last = end
        tokens += self._continue(text[last:], first=last == 0)
        return self._with_bos(tokens)

    def tokenize_continuation(self, text: str) -> list[int]:
        """Token ids of a text that follows other tokens: no space in front that is not its own, and no control tokens."""
        return self._encode(self._rest, text, parse_special=False)

    def least_tokens(self, text: str) -> int:
        """No fewer tokens does ``text`` have; 0 where nothing is known. This takes far less time than tokenizing it."""
        return self._least.of(text)

    def _continue(self, text: str, *, first: bool) -> list[int]:
        """Tokens of a text in the middle of another, where no space may be put in front.

        Up to its first control token; what comes after that one is as it would be anywhere.
        """
        if first:
            return self._encode(self._whole, text, parse_special=True)
        tokens = self._encode(self._rest, text, parse_special=True)
        place = next((place for place, token in enumerate(tokens) if token in self._control), None)
        if place is None:
            return tokens
        at = text.index(self._added[tokens[place]])
        return tokens[:place] + self._encode(self._whole, text[at:], parse_special=True)

    def _with_bos(self, tokens: list[int]) -> list[int]:
        if self._bos is None or not self._adds_bos or tokens[:1] == [self._bos]:
            return tokens
        return [self._bos, *tokens]

    @staticmethod
    def _encode(tokenizer: Any, text: str, *, parse_special: bool) -> list[int]:
        if not text:
            return []
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(
                "the text holds half of a surrogate pair, which is no character", param="prompt"
            ) from None
        tokenizer.encode_special_tokens = not parse_special
        try:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        except BaseException as error:
            if not is_failure(error):
                raise
            raise InvalidRequest(f"the model's tokenizer failed on this text: {error}", param="prompt") from error
        return ids

    # --- tokens to text ---------------------------------------------------------------------------------------

    def piece(self, token: int) -> bytes:
        """The bytes that ``token`` adds to a text; none for a control token."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = b"" if token in self._control else self.spelled(token)
        return piece

    def detokenize(self, tokens: list[int]) -> bytes:
        """The text of ``tokens``, control tokens spelled out. Raises InvalidRequest for an id that does not exist."""
        self.check(tokens, param="tokens")
        return b"".join(self.pieces(tokens)) if tokens else b""

    def pieces(self, tokens: list[int]) -> list[bytes]:
        """What each of ``tokens`` is in their text, control tokens spelled out. There must be at least one."""
        pieces = [self.spelled(token) for token in tokens]
        if self._decoder.strips and tokens[0] not in self._added:
            pieces[0] = pieces[0].removeprefix(b" ")
        return pieces

    def check(self, tokens: list[int], *, param: str) -> None:
        """Raises InvalidRequest if any id is not in the vocabulary: native code indexes arrays with them."""
        if tokens and not (min(tokens) >= 0 and max(tokens) < self.size):
            unknown = next(token for token in tokens if not 0 <= token < self.size)
            raise InvalidRequest(
                f"token id {unknown} is not in this model's vocabulary (0 to {self.size - 1})", param=param
            )

    def spelled(self, token: int) -> bytes:
        """The bytes of ``token``, a control token's too."""
        added = self._added.get(token)
        if added is not None:
            return added.encode()
        text = self._whole.id_to_token(token)  # None for a row that only fills the matrix up
        return b"" if text is None else self._decoder.piece(text)

    def grammar_vocabulary(self) -> GrammarVocabulary:
        """From any thread. Raises InvalidRequest for a model that knows no end."""
        ends = sorted(token for token in self.ends if 0 <= token < self.size)
        if not ends:
            raise InvalidRequest("this model names no token that ends a text, so it can follow no grammar")
        tokens = [b"" if token in self.ends else self.piece(token) for token in range(self.size)]
        return GrammarVocabulary(tokens, ends, lambda text: self._encode(self._rest, text, parse_special=False))


def _tokenizer(text: str) -> Any:
    tokenizer = tokenizers.Tokenizer.from_str(text)
    tokenizer.no_truncation()  # some files carry a limit from the time the model was trained, and cut without a word
    tokenizer.no_padding()
    return tokenizer


def _without_prefix(description: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer without what puts a space in front of a text: for one that goes on."""
    changed = copy.deepcopy(description)
    for part in _normalizers(changed.get("normalizer")):
        if part.get("type") == "Prepend":
            part["prepend"] = ""
    for part in _normalizers(changed.get("pre_tokenizer")):
        if part.get("type") == "Metaspace":
            part["prepend_scheme"] = "never"
            part.pop("add_prefix_space", None)
        elif part.get("type") == "ByteLevel":
            part["add_prefix_space"] = False
    return changed


def _normalizers(part: Any) -> list[dict[str, Any]]:
    if not isinstance(part, dict):
        return []
    inner = part.get("normalizers", part.get("pretokenizers"))
    return [part] if inner is None else [found for item in inner for found in _normalizers(item)]
