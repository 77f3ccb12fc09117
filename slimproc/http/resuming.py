"""Streams that outlive their engine: which answers can go on in another one, and how their clients are told."""

from __future__ import annotations

from typing import Final

from slimproc.http.sse import EventStream
from slimproc.ipc.wire import Said, Tok
from slimproc.request import GenerateRequest
from slimproc.stream import Flushable

HEADER: Final = "X-Slimproc-On-Crash"
"""Of a stream whose model has ``on_crash: resume``: ``resume``, or ``fail`` and why it is not safe."""
_RESUMED: Final = b": the engine died, and this goes on in another one\n\n"


def obstacle(request: GenerateRequest) -> str:
    """What keeps its streams from being continued behind their own text; empty: nothing does.

    A grammar does not begin in the middle, an echo and log probabilities belong to the tokens that were, and a seed
    promises a text that only its own first draw leads to.
    """
    sampling = request.sampling
    if request.grammar is not None:
        return "grammar"
    if request.logprobs is not None:
        return "logprobs"
    if request.echo:
        return "echo"
    return "seed" if sampling.seed is not None and sampling.temperature > 0 else ""


def header(request: GenerateRequest) -> dict[str, str]:
    """What its stream says of itself; nothing where the model does not resume."""
    if request.on_crash != "resume":
        return {}
    reason = obstacle(request)
    return {HEADER: f"fail; {reason}" if reason else "resume"}


class ResumableEventStream(EventStream):
    """Keeps what it has said, so that another engine can go on behind it, as often as it has got further since the last time."""

    __slots__ = ()

    def take(self, item: Tok, at_ns: int, gathering: list[Flushable] | None) -> None:
        if item.text:
            self.parts.append(item.text)
        super().take(item, at_ns, gathering)

    @property
    def delivered(self) -> bool:
        return bool(self.parts)

    def go_on(self) -> bool:
        if self.said is not None and self.said.tokens == self.completion_tokens:
            return False
        self.flush()
        self.said = Said(self.text, self.completion_tokens)
        self.parts = [self.said.text]
        self.error = None
        self.first_at_ns = 0
        self._client.write(_RESUMED)
        return True
