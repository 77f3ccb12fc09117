"""What crosses between the front and the renderer: length-prefixed msgpack of these structs, on one socket.

The front sends Render. The child answers Hello once, and then each Render with Unknown or Refused, or with Began and
after it Done or Refused. Each answer carries its Render's number.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Final

import msgspec

HEADER: Final = 4
"""Bytes of big-endian length before each message."""


class Template(msgspec.Struct, frozen=True, dict=True):
    """A model's chat template, and what it and its tokenizer treat specially. Made once per model, then shared."""

    source: str
    control_tokens: tuple[str, ...] = ()
    bos_token: str = ""
    eos_token: str = ""

    @functools.cached_property
    def key(self) -> bytes:
        """Names the template to a child that has seen it, so that it is sent once."""
        return hashlib.sha256(encode(self)).digest()


class Render(msgspec.Struct, frozen=True, tag="render"):
    """``messages`` is a msgpack list of dicts. ``template`` is sent only to a child that did not know ``key``."""

    number: int
    key: bytes
    messages: msgspec.Raw
    template: Template | None = None


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The child is ready."""


class Unknown(msgspec.Struct, frozen=True, tag="unknown"):
    """The child has no template of that key (any more)."""

    number: int


class Began(msgspec.Struct, frozen=True, tag="began"):
    """The template is compiled and the messages are read; from here on the time counts."""

    number: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    number: int
    text: str
    literals: list[tuple[int, int]]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """``message`` is for the caller. ``spent``: the child ends itself after it, as its memory ran out."""

    number: int
    message: str
    spent: bool = False


Answer = Hello | Unknown | Began | Done | Refused

encode = msgspec.msgpack.Encoder().encode
decode_render = msgspec.msgpack.Decoder(Render).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def frame(message: msgspec.Struct) -> bytes:
    """One message as it goes over the socket."""
    body = encode(message)
    return len(body).to_bytes(HEADER) + body
