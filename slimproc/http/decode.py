"""From a body's bytes to a typed struct: strict JSON, bounded work, and errors that name the field.

What is refused beyond what msgspec refuses (NaN, numbers out of range, unpaired surrogates, trailing text):

- bytes that are not UTF-8, even in fields that nobody reads;
- the same top-level key twice: a proxy in front may have checked the one and we would act on the other. Inside
  nested objects the last one wins, as in every common parser: nothing is decided there before we read it;
- a NUL character in any string, since what is native below us may end a string there;
- more than 256 top-level keys, and nesting deeper than Python's own recursion limit allows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from slimproc.errors import InvalidRequest

T = TypeVar("T")

MAX_KEYS: Final = 256
"""Top-level keys. Each costs a call into Python, and no client sends more than a few dozen."""

_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")

_WORDS: Final = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
"""JSON's words for msgspec's. ``array``, ``object`` and ``null`` are the same in both."""


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode a whole body, which must be one JSON object. Raises InvalidRequest; ``param`` is the field's path."""
    _refuse_bad_text(body)
    _translated(lambda: _refuse_duplicates(body), body, "")
    return _translated(lambda: decoder.decode(body), body, "")


def decode_field(value: bytes, decoder: msgspec.json.Decoder[T], field: str) -> T:
    """Decode one field of a body that ``decode`` has passed, kept as ``msgspec.Raw`` until its form is known."""
    return _translated(lambda: decoder.decode(value), value, field)


def _refuse_bad_text(body: bytes) -> None:
    if not body or body.isspace():
        raise InvalidRequest("the body is empty; a JSON object is needed")
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"the body is not UTF-8 (byte {error.start})") from None
    if b"\\u0000" in body:
        # After an escaped backslash it is text that talks of NUL. Pairs are blotted out without moving anything.
        at = body.replace(rb"\\", b"..").find(rb"\u0000")
        if at >= 0:
            raise InvalidRequest(f"a string contains the NUL character (byte {at})")


class _Key:
    """A key that equals no other, so that a repeated one shows. msgspec makes it through ``dec_hook``."""

    __slots__ = ()


def _refuse_duplicates(body: bytes) -> None:
    """Skip through the body (0.6 ms a MiB), looking at its top-level keys only."""
    seen: set[str] = set()

    def look(_: type, name: str) -> _Key:
        if name in seen:
            raise InvalidRequest(f"the key {name!r} is there twice", param=name)
        if len(seen) == MAX_KEYS:
            raise InvalidRequest(f"the body has more than {MAX_KEYS} keys")
        seen.add(name)
        return _Key()

    msgspec.json.decode(body, type=dict[_Key, msgspec.Raw], dec_hook=look)


def _translated(work: Callable[[], T], text: bytes, root: str) -> T:
    """Do ``work``; what msgspec has to say becomes an InvalidRequest."""
    try:
        return work()
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error), root) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", param=root or None) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        detail = str(error).removeprefix("JSON is malformed: ")
        # msgspec calls an unpaired surrogate at the end of a string "truncated", which would send people astray.
        if "truncated" in detail and _SURROGATE.search(text):
            detail = "it is cut off, or half of a surrogate pair stands alone"
        raise InvalidRequest(f"the body is not valid JSON: {detail}", param=root or None) from None


def _invalid_field(text: str, root: str) -> InvalidRequest:
    """Turn msgspec's sentence into ours. Its form is ``what is wrong - at `$.path` ``, the path only where there is one.

    The last ``- at`` counts: what stands before it may quote the caller.
    """
    detail, at, tail = text.rpartition(" - at `")
    if not at:
        detail, tail = text, "$"
    in_key = tail.startswith("key` in `")
    path = root + tail.removeprefix("key` in `").rstrip("`").removeprefix("$")
    path = path.removeprefix(".").partition("[...]")[0]
    keep_index = False
    if detail.startswith("Object missing required field"):
        path = f"{path}.{detail.split('`')[1]}".removeprefix(".")
        detail = "is required"
    elif detail.startswith("Invalid "):  # "Invalid enum value 'x'", "Invalid value 'x'"
        detail = f"{detail.partition('value ')[2]} is unknown or not supported"
    elif detail.startswith("Expected "):
        keep_index = detail.startswith("Expected `object")
        detail = _in_json_words(detail[0].lower() + detail[1:])
    else:
        detail = detail[0].lower() + detail[1:]
    subject = f"a key of {path}" if in_key else path or "the body"
    return InvalidRequest(f"{subject}: {detail}", param=_param(path, keep_index=keep_index))


def _in_json_words(detail: str) -> str:
    def words(match: re.Match[str]) -> str:
        return " or ".join(_WORDS.get(word, word) for word in match[1].split(" | "))

    return re.sub(r"`([^`]*)`", words, detail)


def _param(path: str, *, keep_index: bool) -> str | None:
    """The field to name. A last index stays where it leads to an object (``messages[3]``), not among scalars (``stop``)."""
    if not keep_index:
        path = re.sub(r"(?:\[\d+\])+$", "", path)
    return path or None


def unsupported(field: str, detail: str = "") -> InvalidRequest:
    """The answer to a known field whose meaning this server does not have: refused, never silently dropped."""
    return InvalidRequest(f"{field}: {detail or 'not supported yet'}", param=field)


def given(value: Any) -> bool:
    """Whether a ``msgspec.Raw`` field was sent and is not null."""
    return bytes(value) not in {b"", b"null"}
