"""An engine's loop without its process, for vectors: turns texts into pooled sequences and steps a backend."""

from __future__ import annotations

import itertools

import numpy as np

from slimproc.engines.backend import Backend, Embedded, SequenceFailed
from slimproc.engines.pooled import PooledSequence
from slimproc.ipc.wire import Embed, ModelInfo

STEP_LIMIT = 10_000


class EmbeddingEngine:
    """A loaded backend. ``steps`` counts the calls of the model."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.info: ModelInfo = backend.load(lambda _: None)
        self.steps = 0
        self._rids = itertools.count(1)

    def begin(
        self, prompt: str | list[int], *, query: str | None = None, dimensions: int | None = None
    ) -> PooledSequence:
        command = Embed(rid=next(self._rids), prompt=prompt, name="input", query=query, dimensions=dimensions)
        tokens = self.backend.tokenize_input(prompt, query=query) if isinstance(prompt, str) else prompt
        assert 0 < len(tokens) <= self.info.context
        sequence = PooledSequence(command, tokens, self.info.context)
        self.backend.add(sequence)
        return sequence

    def finish(self, *sequences: PooledSequence) -> list[np.ndarray | str]:
        """Step until all of these have ended: each one's vector, or why it failed."""
        ended: dict[PooledSequence, np.ndarray | str] = {}
        for _ in range(STEP_LIMIT):
            if all(sequence in ended for sequence in sequences):
                return [ended[sequence] for sequence in sequences]
            self.steps += 1
            for event in self.backend.step():
                assert event.sequence not in ended, "one terminal event"
                if isinstance(event, SequenceFailed):
                    ended[event.sequence] = event.message
                else:
                    assert isinstance(event, Embedded)
                    ended[event.sequence] = np.frombuffer(event.vector, "<f4")
                self.backend.remove(event.sequence)
        raise AssertionError("a sequence never ended")

    def vectors(self, texts: list[str | list[int]], **options) -> np.ndarray:
        """[texts, values]."""
        return np.stack(self.finish(*[self.begin(text, **options) for text in texts]))

    def close(self) -> None:
        self.backend.close()
