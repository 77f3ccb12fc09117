"""NativeTokenizer: text to token ids by llama.cpp, which some texts would have end the process: they are refused, or get
the room that they need.
"""

from __future__ import annotations

import ctypes
import functools
import threading
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


class NativeTokenizer:
    """Of one vocabulary, and as long as that lives."""

    def __init__(self, handle: Any, attributes: list[int]) -> None:
        """``attributes``: llama.cpp's, of each token."""
        self._handle = handle
        self._attributes = attributes
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
            encoded = text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(
                "the text holds half of a surrogate pair, which is no character", param="prompt"
            ) from None
        if self._spelling is not None:
            self._spelling.check(text)
        call = functools.partial(self._call, encoded, add_special, parse_special)
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
