"""The renderer: the child process that renders chat templates, one at a time, within its own limits.

Run by ``process.py`` as ``python -m slimproc.chat.renderer MEMORY OUTPUT SECONDS`` with its socket as file descriptor 0.
It imports no event loop and no web framework: it starts in a tenth of a second and is cheap to kill.
"""

from __future__ import annotations

import collections
import ctypes
import io
import resource
import signal
import socket
import sys
from typing import Any, Final

import jinja2
import msgspec

from slimproc.chat.marking import Marked, Marker, TooManyTwins
from slimproc.chat.protocol import (
    HEADER,
    Began,
    Done,
    Hello,
    Refused,
    Render,
    Template,
    Unknown,
    decode_render,
    frame,
)
from slimproc.chat.sandbox import OutputTooLong, clip, describe_broken, describe_failure, environment

_CACHED: Final = 16
"""Compiled templates kept; a machine seldom serves more models."""

_PR_SET_PDEATHSIG: Final = 1

_decode_messages = msgspec.msgpack.Decoder(list[dict[str, Any]]).decode


class _Prepared:
    """A compiled template with its marker."""

    def __init__(self, template: Template, env: jinja2.Environment) -> None:
        self.compiled = env.from_string(template.source)
        written = (template.bos_token, template.eos_token)
        self.marker = Marker(template.control_tokens, template.source, *written)
        self.variables: dict[str, Any] = {
            "add_generation_prompt": True,
            "bos_token": template.bos_token,
            "eos_token": template.eos_token,
            # Templates ask `tools is not none`, which an undefined name would answer with yes.
            "tools": None,
            "documents": None,
        }

    def render(self, marked: Marked, limit: int) -> str:
        """The text with its marks. Raises OutputTooLong, and whatever the template does."""
        parts: list[str] = []
        size = 0
        for part in self.compiled.generate(messages=marked.messages, **self.variables):
            size += len(part) if part.isascii() else len(part.encode())
            if size > limit:
                raise OutputTooLong(limit)
            parts.append(part)
        return "".join(parts)


class _Server:
    def __init__(self, stream: io.BufferedRWPair, output_limit: int, seconds: int) -> None:
        self._stream = stream
        self._output_limit = output_limit
        self._seconds = seconds
        self._environment = environment()
        self._prepared: collections.OrderedDict[bytes, _Prepared] = collections.OrderedDict()

    def serve(self) -> None:
        """Answer until the front closes the socket, or until memory ran out once: what is left of it is uncertain."""
        self._send(Hello())
        while header := self._stream.read(HEADER):
            render = decode_render(self._stream.read(int.from_bytes(header)))
            # The front kills a render that takes too long. Should the front be gone, this ends it all the same.
            signal.alarm(self._seconds)
            answer = self._answer(render)
            signal.alarm(0)
            self._send(answer)
            if isinstance(answer, Refused) and answer.spent:
                return

    def _answer(self, render: Render) -> Done | Refused | Unknown:
        try:
            prepared = self._prepare(render)
        except Exception as error:  # noqa: BLE001 -- whatever a template does to the compiler is its own failure
            return Refused(render.number, describe_broken(error), spent=isinstance(error, MemoryError))
        if prepared is None:
            return Unknown(render.number)
        marked: Marked | None = None
        try:
            messages = [_without_null(message) for message in _decode_messages(render.messages)]
            self._send(Began(render.number))
            marked = prepared.marker.mark(messages)
            rendered = prepared.render(marked, self._output_limit)
            text = marked.restore(rendered)
            return Done(render.number, text, marked.literals(rendered, text))
        except TooManyTwins:
            return Refused(render.number, "the messages use too many different private-use characters")
        except Exception as error:  # noqa: BLE001 -- the same: any exception is the template's answer
            message = describe_failure(error)
            message = clip(marked.restore(message)) if marked else message
            return Refused(render.number, message, spent=isinstance(error, MemoryError))

    def _prepare(self, render: Render) -> _Prepared | None:
        prepared = self._prepared.get(render.key)
        if prepared is None:
            if render.template is None:
                return None
            prepared = self._prepared[render.key] = _Prepared(render.template, self._environment)
            if len(self._prepared) > _CACHED:
                self._prepared.popitem(last=False)
        self._prepared.move_to_end(render.key)
        return prepared

    def _send(self, message: msgspec.Struct) -> None:
        self._stream.write(frame(message))
        self._stream.flush()


def _without_null(message: dict[str, Any]) -> dict[str, Any]:
    # An assistant that only calls tools has no content; most templates would write it as "None".
    return message if message.get("content") is not None else {**message, "content": ""}


def _confine(memory_limit: int) -> None:
    """No more memory than this, no files, no processes, no core; and no longer than the front lives."""
    limits = {"RLIMIT_NOFILE": 16, "RLIMIT_CORE": 0, "RLIMIT_FSIZE": 0, "RLIMIT_NPROC": 0}
    if sys.platform == "linux":  # macOS knows RLIMIT_AS but does not keep to it
        limits["RLIMIT_AS"] = memory_limit
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    # A service manager signals the whole group; the front still needs its renderer while it drains.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def main() -> None:
    memory_limit, output_limit, seconds = map(int, sys.argv[1:])
    _confine(memory_limit)
    with socket.socket(fileno=0) as channel, channel.makefile("rwb") as stream:
        _Server(stream, output_limit, seconds).serve()


if __name__ == "__main__":
    main()
