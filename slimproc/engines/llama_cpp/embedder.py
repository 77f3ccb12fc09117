"""Embedder: reads whole texts, several in one call of the model, and gives each one's vector or rank."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from slimproc.engines.backend import Embedded, SequenceFailed
from slimproc.engines.llama_cpp.library import lib, native_log
from slimproc.engines.llama_cpp.model import BATCH, LoadedModel
from slimproc.engines.llama_cpp.native_batch import NativeBatch
from slimproc.engines.llama_cpp.pooling import Pooling
from slimproc.engines.pooled import PooledSequence
from slimproc.engines.sequence import Sequence

if TYPE_CHECKING:
    from slimproc.engines.llama_cpp.drawing import Floats

_RECOVERABLE = {1, 2, -1}
"""What llama_decode says of a batch that it refused with its state intact; anything else is fatal."""


class Embedder:
    """What ``LlamaCppBackend`` does with a model that makes vectors. Texts are read in the order of their arrival."""

    def __init__(self, model: LoadedModel) -> None:
        assert model.pooling is not None
        self._model = model
        self._ranks = model.pooling is Pooling.RANK
        # A rank's head has as many values as the model has classes, often one; whoever reads a vector's length there
        # reads other memory of the process, and tells a caller.
        self._width = model.rank_values if self._ranks else model.vector_size
        self._batch = NativeBatch(model.batch_tokens)
        self._waiting: dict[int, PooledSequence] = {}
        """By rid, oldest first."""
        self._doubtful: set[int] = set()
        """Texts whose vectors made no sense in a call that they shared: a neighbour's NaN gets through the mask between
        them, so each is read again by itself."""

    def add(self, sequence: PooledSequence) -> None:
        """Raises InvalidRequest for token ids outside the vocabulary."""
        self._model.vocabulary.check(sequence.prompt, param="input")
        assert 0 < len(sequence.prompt) <= self._model.context_tokens, "the caller refuses what is longer"
        self._waiting[sequence.rid] = sequence

    def remove(self, sequence: Sequence) -> None:
        self._waiting.pop(sequence.rid, None)
        self._doubtful.discard(sequence.rid)

    def step(self) -> list[Embedded | SequenceFailed]:
        """One call of the model. Raises RuntimeError when the context is broken: the engine cannot go on."""
        chosen = self._choose()
        if not chosen:
            return []
        self._fill(chosen)
        code = self._batch.decode(self._model.context)
        if code not in {0, *_RECOVERABLE}:
            raise RuntimeError(f"llama_decode failed with {code}: {native_log.cause('no reason given')}")
        if code == 0:
            events = [self._read(row, sequence) for row, sequence in enumerate(chosen)]
        else:
            events = [SequenceFailed(one, f"llama.cpp refused the batch (code {code})") for one in chosen]
        sound = not any(isinstance(event, SequenceFailed) for event in events)
        if self._model.memory:
            # Nothing of a text is of use to another; values that are no numbers would harm it, masked as they are.
            lib.llama_memory_clear(self._model.memory, not sound)
        if code == 0 and not sound and len(chosen) > 1:
            self._doubtful.update(event.sequence.rid for event in events if isinstance(event, SequenceFailed))
            events = [event for event in events if isinstance(event, Embedded)]
        for event in events:
            del self._waiting[event.sequence.rid]
        return events

    def _choose(self) -> list[PooledSequence]:
        """The oldest texts that fit in a call together: no more than BATCH tokens, so that a cancellation is soon heard,
        or one text that is longer. Attention looks both ways, so no text can be cut.
        """
        chosen: list[PooledSequence] = []
        tokens = 0
        for sequence in self._waiting.values():
            tokens += len(sequence.prompt)
            alone = sequence.rid in self._doubtful
            if chosen and (alone or tokens > BATCH or len(chosen) == self._model.slots):
                break
            chosen.append(sequence)
            if alone:
                break
        return chosen

    def _fill(self, chosen: list[PooledSequence]) -> None:
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        for row, sequence in enumerate(chosen):
            tokens += sequence.prompt
            positions += range(len(sequence.prompt))
            rows += (row,) * len(sequence.prompt)
        self._batch.fill(tokens, positions, rows, [1] * len(tokens))

    def _read(self, row: int, sequence: PooledSequence) -> Embedded | SequenceFailed:
        pooled = lib.llama_get_embeddings_seq(self._model.context, row)
        assert pooled, "llama.cpp kept no vector"
        values = np.ctypeslib.as_array(_floats(pooled, self._width))
        if not np.isfinite(values).all():
            return SequenceFailed(sequence, "the model gave no vector that has a meaning (NaN or infinity)")
        answer = _rank(values) if self._ranks else _unit(values[: sequence.dimensions])
        return Embedded(sequence, answer.astype("<f4").tobytes())


def _floats(pointer: Any, count: int) -> Any:
    address = ctypes.cast(pointer, ctypes.c_void_p).value
    assert address is not None
    return (ctypes.c_float * count).from_address(address)


def _unit(values: Floats) -> Floats:
    """Of length 1, also after a cut; what is all zeros stays."""
    norm = float(np.linalg.norm(values.astype(np.float64)))
    return values / np.float32(norm) if norm > 0 else values


def _rank(values: Floats) -> Floats:
    """The first class's value, as the model gives it. A head with one class gives a number without bounds: its logistic
    is a share from 0 to 1, as callers of this route know it.
    """
    score = float(values[0])
    if len(values) == 1:
        score = 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))
    return np.array([score], np.float32)
