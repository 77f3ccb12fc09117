"""NativeTokenizer: text to token ids by llama.cpp, which some texts would have end the process or work for hours: they are
refused, get the room that they need, or are written and cut so that their tokens stay the same.
"""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from itertools import pairwise
from typing import Any

from slimproc.engines.llama_cpp.library import lib
from slimproc.errors import InvalidRequest

CUTS = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN | lib.LLAMA_TOKEN_ATTR_USER_DEFINED
"""Attributes of the tokens that a text is searched for before all others."""
_STRIPS = lib.LLAMA_TOKEN_ATTR_LSTRIP | lib.LLAMA_TOKEN_ATTR_RSTRIP
_MARK = "▁"
"""How SentencePiece writes a space."""
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
"""The tokens by which SentencePiece spells what it has no other for."""
_SHALLOW = 4_000
"""Characters for which any thread's stack is enough."""
_STACK_PER_CHARACTER, _LEAST_STACK = 1 << 10, 16 << 20
"""Bytes. Many a vocabulary cuts texts into words by std::regex, which calls itself for every character of a word and
takes 324 bytes each time: 26,000 letters without a space end a process whose stack is 8 MiB."""
_IN_THREES = "superbpe"
"""The kind of vocabulary (``tokenizer.ggml.pre``) that groups digits by three from the right, and looks for that at each of
them through to the row's end: 100,000 digits take minutes, a million hours."""
_ROW = 48
"""Digits of a piece into which a longer row is cut, a multiple of three: two microseconds a digit."""
_LONG_ROW = re.compile(f"[0-9]{{{_ROW + 1},}}")
_BLANKS_APART = "whitespace"
"""The kind that sets the blanks between two words apart as they are, and ends the process where there is more than one."""
_BLANKS = re.compile("[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]{2,}")
"""As llama.cpp counts them."""


class NativeTokenizer:
    """Of one vocabulary, and as long as that lives."""

    def __init__(self, handle: Any, attributes: list[int], pre: str) -> None:
        """``attributes``: llama.cpp's, of each token. ``pre``: how texts are cut into words, as the file names it."""
        self._handle = handle
        self._attributes = attributes
        self._pre = pre
        kind = lib.llama_vocab_type(handle)
        self._by_regex = kind == lib.LLAMA_VOCAB_TYPE_BPE
        self._by_letters = kind == lib.LLAMA_VOCAB_TYPE_SPM
        self._spelling: _Spelling | None = None
        """What can be spelled, where that is not everything."""
        if self._by_letters and not set(_BYTES) <= set(self._texts(lib.LLAMA_TOKEN_ATTR_BYTE)):
            self._spelling = _Spelling(set(self._texts()), self._texts(CUTS))

    def tokens(self, text: str, *, parse_special: bool, add_special: bool = False) -> list[int]:
        """Token ids. Raises InvalidRequest for a text that cannot be tokenized."""
        if not text:
            return []
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(
                "the text holds half of a surrogate pair, which is no character", param="prompt"
            ) from None
        if self._spelling is not None:
            self._spelling.check(text)
        if self._by_regex and self._pre == _BLANKS_APART:  # a blank has no token, wherever it stands
            text = _BLANKS.sub(lambda run: run[0].replace(" ", "") or " ", text)
        if self._by_regex and self._pre == _IN_THREES and (cuts := _cuts(text)):
            return self._in_pieces(text, cuts, parse_special, add_special)
        return self._with_room(text, parse_special, add_special)

    def _in_pieces(self, text: str, cuts: list[int], parse_special: bool, add_special: bool) -> list[int]:  # noqa: FBT001  # as llama.cpp
        tokens: list[int] = []
        for start, end in pairwise([0, *cuts, len(text)]):
            tokens += self._with_room(text[start:end], parse_special, add_special=False)
        begins = add_special and lib.llama_vocab_get_add_bos(self._handle)
        ends = add_special and lib.llama_vocab_get_add_eos(self._handle)
        before = [lib.llama_vocab_bos(self._handle)] if begins else []
        return [*before, *tokens, *([lib.llama_vocab_eos(self._handle)] if ends else [])]

    def _with_room(self, text: str, parse_special: bool, add_special: bool) -> list[int]:  # noqa: FBT001  # as llama.cpp
        call = functools.partial(self._call, text.encode(), add_special, parse_special)
        return call() if not self._by_regex or len(text) <= _SHALLOW else _with_stack(call, len(text))

    def least_tokens(self, text: str) -> int:
        """No fewer tokens does ``text`` have; 0 where nothing is known. This takes far less time than tokenizing it."""
        longest = self._longest_piece
        if longest is None:
            return 0
        encoded = text.encode("utf-8", "replace")
        if any(attribute & _STRIPS for attribute in self._attributes):  # such tokens swallow the blanks around them
            encoded = b"".join(encoded.split())
        return -(-len(encoded) // longest)

    def _call(self, encoded: bytes, add_special: bool, parse_special: bool) -> list[int]:  # noqa: FBT001  # as llama.cpp
        room = len(encoded) + 16
        for _ in range(2):
            array = (lib.llama_token * room)()
            count = lib.llama_tokenize(self._handle, encoded, len(encoded), array, room, add_special, parse_special)
            if count >= 0:
                return list(array[:count])
            room = -count
        raise _too_long()

    def _texts(self, wanted: int = -1) -> list[str]:
        """The tokens as the vocabulary writes them, of those that have one of the attributes ``wanted``; all without."""
        return [
            lib.llama_vocab_get_text(self._handle, token).decode("utf-8", "replace")
            for token, attribute in enumerate(self._attributes)
            if wanted == -1 or attribute & wanted
        ]

    @functools.cached_property
    def _longest_piece(self) -> int | None:
        """How many bytes of a text one token stands for at most. None: text can vanish, so there is no such number."""
        if not self._by_regex and not self._by_letters:
            return None
        buffer = ctypes.create_string_buffer(1)
        longest, single = 1, set()
        for token in range(len(self._attributes)):
            count = lib.llama_token_to_piece(self._handle, token, buffer, 1, 0, True)
            if count == 1:
                single.add(buffer.raw)
            longest = max(longest, -count)
        # Where bytes have no tokens, the one kind of vocabulary leaves them out, and the other has been refused them.
        return longest if self._by_letters or len(single) == 256 else None


def _cuts(text: str) -> list[int]:
    """Places in long rows of digits where a group of three begins: cut there, the text has the same words."""
    found: list[int] = []
    for row in _LONG_ROW.finditer(text):
        found += range(row.end() - (len(row[0]) - 1) // _ROW * _ROW, row.end(), _ROW)
    return found


class _Spelling:
    """A SentencePiece vocabulary that lacks tokens for single bytes: for what it cannot spell llama.cpp throws."""

    def __init__(self, texts: set[str], cuts: list[str]) -> None:
        """``texts``: all tokens as they are written; ``cuts``: those that are found whole."""
        self._characters = {text for text in texts if len(text) == 1}
        self._bytes = {byte for byte in range(256) if _BYTES[byte] in texts or (byte < 128 and chr(byte) in texts)}
        self._cuts = sorted(filter(None, cuts), key=len, reverse=True)

    def check(self, text: str) -> None:
        """Raises InvalidRequest."""
        for cut in self._cuts:
            text = text.replace(cut, "")
        for character in {_MARK, *text.replace(" ", _MARK)} - self._characters:
            if not self._bytes.issuperset(character.encode()):
                raise InvalidRequest(f"this model's vocabulary cannot spell {character!r}", param="prompt")


def _with_stack(call: functools.partial[list[int]], characters: int) -> list[int]:
    """In a thread whose stack is as large as such a text may want; what is not used of it takes no memory."""
    outcome: list[list[int] | BaseException] = []

    def work() -> None:
        try:
            outcome.append(call())
        except BaseException as error:  # noqa: BLE001  # it is raised where it was asked for
            outcome.append(error)

    thread = threading.Thread(target=work, name="tokenizing")
    before = threading.stack_size(_LEAST_STACK + characters * _STACK_PER_CHARACTER)
    try:
        thread.start()
    except RuntimeError:  # there is no room for such a stack
        raise _too_long() from None
    finally:
        threading.stack_size(before)
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def _too_long() -> InvalidRequest:
    return InvalidRequest("the text is too long to be tokenized", param="prompt")
