"""TokenStream: one sequence on its way from an engine's ring to a client, and what was counted on the way.

A replica delivers into it, admission hears when it starts and ends, and a subclass in ``http/`` turns text into bytes.
It never waits: a client that does not read is the subclass's to drop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from slimproc.errors import SlimprocError
from slimproc.ipc.wire import Said, Tok
from slimproc.request import Finish, Usage


class Flushable(Protocol):
    """Something that gathers the text of one ring wake-up and writes it in one piece at its end."""

    def flush(self) -> None: ...


class TokenStream:
    """One sequence's receiving end; this base joins the text. Ends exactly once: by a finish, or by an error."""

    __slots__ = (
        "completion_tokens", "error", "finish", "first_at_ns", "index", "last_at_ns", "on_end", "on_first", "parts",
        "said", "usage",
    )  # fmt: skip

    def __init__(self, index: int = 0) -> None:
        self.index = index
        """The choice's place in the answer."""
        self.parts: list[str] = []
        self.completion_tokens = 0
        self.first_at_ns = 0
        """When the first text was made (the engine's monotonic clock, which is also ours); 0: not yet, or not yet by the
        engine with which it goes on."""
        self.last_at_ns = 0
        self.finish = Finish.RUNNING
        self.usage = Usage()
        self.error: SlimprocError | None = None
        self.said: Said | None = None
        """What it goes on behind, since ``go_on``."""
        self.on_first: Callable[[TokenStream], None] | None = None
        self.on_end: Callable[[TokenStream], None] | None = None

    def take(self, item: Tok, at_ns: int, gathering: list[Flushable] | None) -> None:  # noqa: ARG002  # for subclasses
        """What one step made for this sequence. ``gathering`` collects what is to be flushed when this wake-up ends;
        None: nothing else is waiting, so write at once.
        """
        if item.text:
            self.parts.append(item.text)
        self._note(item, at_ns)

    def _note(self, item: Tok, at_ns: int) -> None:
        self.completion_tokens += item.tokens
        self.last_at_ns = at_ns
        if not self.first_at_ns and (item.text or item.finish):
            self.first_at_ns = at_ns
            if self.on_first is not None:
                self.on_first(self)
        if item.finish and not self.ended:
            self.finish = Finish(item.finish)
            self.usage = item.usage or Usage()
            self._end()

    def fail(self, error: SlimprocError) -> None:
        """End by an error. Nothing is written here: whether it becomes a status or an event, the handler knows."""
        if not self.ended:
            self.error = error
            self._end()

    def _end(self) -> None:
        if self.on_end is not None:
            self.on_end(self)

    def reset(self) -> None:
        """Back to the start, for a second try on another engine; only while nothing was delivered."""
        assert not self.delivered, "text has been delivered: it cannot be taken back"
        self.error = None
        self.completion_tokens = 0
        self.first_at_ns = self.last_at_ns = 0
        self.parts.clear()

    def go_on(self) -> bool:
        """Make ready to go on in another engine behind what was delivered. False: it cannot, and stays ended."""
        return False

    @property
    def delivered(self) -> bool:
        """Some of it has gone to the client. What is joined goes there only at its end."""
        return False

    @property
    def ended(self) -> bool:
        return self.finish is not Finish.RUNNING or self.error is not None

    @property
    def text(self) -> str:
        return "".join(self.parts)


class VectorStream(TokenStream):
    """A sequence whose end is a vector: little-endian float32, or a rank's one value."""

    __slots__ = ("vector",)

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.vector = bytearray()

    def take(self, item: Tok, at_ns: int, gathering: list[Flushable] | None) -> None:
        """Its end by a cancel. An engine that gives it tokens has gone mad."""
        if item.finish != Finish.CANCELLED:
            raise TypeError("tokens for a sequence that generates none")
        super().take(item, at_ns, gathering)

    def take_vector(self, part: bytes, usage: Usage | None, at_ns: int) -> None:
        """``usage`` comes with the last part, and ends the stream. ``first_at_ns`` stays 0: nothing is told before."""
        self.vector += part
        if usage is not None and not self.ended:
            self.last_at_ns = at_ns
            self.finish = Finish.STOP
            self.usage = usage
            self._end()

    def reset(self) -> None:
        super().reset()
        self.vector.clear()
