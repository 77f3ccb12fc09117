"""The receiving ends of sequences whose log probabilities were asked for, joined and streamed."""

from __future__ import annotations

from collections.abc import Callable

from slimproc.http.sse import EventClient, EventStream
from slimproc.ipc.wire import Logprob, ScoredTok, Tok
from slimproc.metrics import GapHistogram
from slimproc.stream import Flushable, TokenStream


class ScoredStream(TokenStream):
    """Joins the text, and gathers the tokens' log probabilities beside it."""

    __slots__ = ("logprobs",)

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.logprobs: list[Logprob] = []

    def take(self, item: Tok, at_ns: int, gathering: list[Flushable] | None) -> None:
        if isinstance(item, ScoredTok):
            self.logprobs += item.logprobs
        super().take(item, at_ns, gathering)

    def reset(self) -> None:
        super().reset()
        self.logprobs.clear()


class ScoredEventStream(EventStream):
    """An event carries the log probabilities of its own text. Each item is an event, and is written at once."""

    __slots__ = ("_event",)

    def __init__(
        self,
        index: int,
        client: EventClient,
        *,
        event: Callable[[int, str, list[Logprob]], bytes],
        finish_events: dict[int, bytes],
        gaps: GapHistogram,
    ) -> None:
        """``event`` makes a whole event of a choice's index, text and log probabilities."""
        super().__init__(index, client, head=b"", tail=b"", finish_events=finish_events, gaps=gaps)
        self._event = event

    def take(self, item: Tok, at_ns: int, gathering: list[Flushable] | None) -> None:  # noqa: ARG002  # nothing waits
        self._take_end(item, at_ns)

    def _write_text(self, item: Tok) -> None:
        logprobs = item.logprobs if isinstance(item, ScoredTok) else []
        if item.text or logprobs:
            self._client.write(self._event(self.index, item.text, logprobs))
