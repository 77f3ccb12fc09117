"""FullContexts: the most that a local model can be asked at once: every slot's context filled to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import cycle, islice
from typing import Final

from slimproc.cli.measuring.failures import CannotMeasure
from slimproc.cli.measuring.subject import Subject
from slimproc.errors import SlimprocError
from slimproc.ipc import wire
from slimproc.replicas.incarnation import Incarnation
from slimproc.replicas.slot import Slot
from slimproc.request import EMBED, GENERATE, SamplingParams
from slimproc.stream import TokenStream, VectorStream

_TEXT: Final = (
    "The harbour master counted every ship at dawn, wrote 27 names into a ledger, and asked who had 3 empty berths. "
    "Nobody answered; two gulls did. "
)
_GENERATED: Final = 32
"""Tokens of a context that are generated rather than read; of a short one a quarter."""
_QUESTION: Final = "Who counts the ships?"


class FullContexts:
    """``concurrency``: sequences at once; None: one in each slot that the configuration gives the model."""

    def __init__(self, subject: Subject, concurrency: int | None) -> None:
        self._subject = subject
        self.concurrency = subject.model.slots if concurrency is None else concurrency

    async def run(self, turn: int) -> None:
        """All sequences, once, from their start to their end. Raises CannotMeasure."""
        engine = self._engine
        if self.concurrency > engine.slots:
            raise CannotMeasure(f"--concurrency: this model takes {engine.slots} at once, not {self.concurrency}")
        words = await self._words(engine)
        if engine.dead:
            raise CannotMeasure(f"{self._subject.model.name}: {engine.status}")
        ends = asyncio.Event()
        slots: list[Slot] = []
        streams: list[TokenStream] = []
        try:
            for place in range(self.concurrency):
                slot = engine.take_slot()
                stream = TokenStream(place) if GENERATE in engine.model.capabilities else VectorStream(place)
                stream.on_end = lambda _: ends.set()
                slot.start(stream, _starter(engine.model, words, turn * self.concurrency + place))
                slots.append(slot)
                streams.append(stream)
            while not all(stream.ended for stream in streams):
                await ends.wait()
                ends.clear()
        finally:
            for slot, stream in zip(slots, streams, strict=True):
                if not stream.ended:
                    slot.cancel()
        for stream in streams:
            if stream.error is not None:
                raise CannotMeasure(f"{self._subject.model.name}: {stream.error}")

    async def close(self) -> None:
        """There is nothing to give back."""

    @property
    def _engine(self) -> Incarnation:
        self._subject.check()
        engine = self._subject.replica.engine
        assert engine is not None, "a local model is an engine"
        return engine

    async def _words(self, engine: Incarnation) -> list[int]:
        """Ordinary tokens of the model, so that a prompt is of the kind that it meets."""
        try:
            report = await engine.ask(lambda n: wire.Tokenize(n, _TEXT, add_special=False, parse_special=False))
        except SlimprocError as error:
            raise CannotMeasure(f"{self._subject.model.name}: {error}") from None
        assert isinstance(report, wire.Tokenized)
        return report.tokens or [0]


def _starter(model: wire.ModelInfo, words: list[int], number: int) -> Callable[[int], wire.Start]:
    """Makes the command of one sequence. No two begin alike, or they would share what was computed."""
    generates = GENERATE in model.capabilities
    generated = min(_GENERATED, model.context // 4) if generates else 0
    prompt = list(islice(cycle(words), number, number + max(1, model.context - generated)))
    if generates:
        return lambda rid: wire.Submit(
            rid=rid, prompt=prompt, max_tokens=generated, sampling=SamplingParams(ignore_eos=True)
        )
    query = None if EMBED in model.capabilities else _QUESTION
    return lambda rid: wire.Embed(rid=rid, prompt=prompt, name="prompt", query=query)
