"""TextOrIds: the four forms in which OpenAI's bodies give prompts: a string, strings, token ids, lists of token ids."""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from slimproc.errors import InvalidRequest
from slimproc.http.decode import decode_field
from slimproc.http.openai.fields import TokenId
from slimproc.request import Prompt

_FIRST: Final = re.compile(rb"\[\s*(.)", re.DOTALL)


class TextOrIds:
    """One field of this kind. Decoded once its form is known, so that 200,000 token ids are one decoder's work."""

    def __init__(self, field: str, *, most: int) -> None:
        """``most``: prompts that one body may have."""
        several = Meta(min_length=1, max_length=most)
        self._field = field
        self._text = msgspec.json.Decoder(str)
        self._ids = msgspec.json.Decoder(Annotated[list[TokenId], Meta(min_length=1)])
        self._texts = msgspec.json.Decoder(Annotated[list[str], several])
        self._id_lists = msgspec.json.Decoder(Annotated[list[list[TokenId]], several])

    def parse(self, value: bytes) -> tuple[list[Prompt], bool]:
        """The prompts, and whether they were given as a list of prompts. ``""`` is a prompt,
        and a list in a list may be empty: that is the caller's to judge.

        The first element says which form a list has; one of another form is refused. Raises InvalidRequest.
        """
        field = self._field
        if not value:
            raise InvalidRequest(f"{field}: is required", param=field)
        first = _FIRST.match(value)
        if first is None:
            if not value.startswith(b'"'):
                raise InvalidRequest(f"{field}: expected string or array", param=field)
            return [decode_field(value, self._text, field)], False
        if first[1] in b"-0123456789":
            return [decode_field(value, self._ids, field)], False
        if first[1] == b"[":
            id_lists = decode_field(value, self._id_lists, field)
            return list(id_lists), True
        texts = decode_field(value, self._texts, field)
        return list(texts), True
