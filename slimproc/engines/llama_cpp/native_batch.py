"""NativeBatch: llama.cpp's batch structure over numpy arrays of our own, and the logits that come of it."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from slimproc.engines.llama_cpp.drawing import Floats
from slimproc.engines.llama_cpp.library import lib


class NativeBatch:
    """Room for ``size`` tokens, each of one sequence. Not more than that: llama.cpp aborts the process."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._tokens, self._positions, self._sequences, self._one = (np.zeros(size, np.int32) for _ in range(4))
        self._one[:] = 1
        self._outputs = np.zeros(size, np.int8)
        # Each token names its sequences through a pointer; they all point into one array, filled like the others.
        base = self._sequences.ctypes.data
        id_pointer = ctypes.POINTER(lib.llama_seq_id)
        self._pointers = (id_pointer * size)(*(ctypes.cast(base + 4 * row, id_pointer) for row in range(size)))
        self._batch = lib.llama_batch(
            n_tokens=0,
            token=_pointer(self._tokens, lib.llama_token),
            embd=None,
            pos=_pointer(self._positions, lib.llama_pos),
            n_seq_id=_pointer(self._one, ctypes.c_int32),
            seq_id=ctypes.cast(self._pointers, ctypes.POINTER(id_pointer)),
            logits=_pointer(self._outputs, ctypes.c_int8),
        )

    def fill(self, tokens: list[int], positions: list[int], sequences: list[int], outputs: list[int]) -> None:
        """Lists of one length; ``outputs`` is 1 where logits are wanted."""
        count = len(tokens)
        assert 0 < count <= self._size
        self._tokens[:count] = tokens
        self._positions[:count] = positions
        self._sequences[:count] = sequences
        self._outputs[:count] = outputs
        self._batch.n_tokens = count

    def decode(self, context: Any) -> int:
        """Evaluate the batch and wait for it; llama_decode's code. Holds no lock of Python's meanwhile."""
        code: int = lib.llama_decode(context, self._batch)
        if code == 0:
            lib.llama_synchronize(context)
        return code

    def logits(self, context: Any, rows: int, width: int) -> Floats:
        """A view of shape (rows, width) in the order of the batch, valid until the next ``decode``."""
        address = ctypes.cast(lib.llama_get_logits(context), ctypes.c_void_p).value
        assert address, "llama.cpp kept no logits"
        values = (ctypes.c_float * (rows * width)).from_address(address)
        return np.ctypeslib.as_array(values).reshape(rows, width)


def _pointer(array: Any, kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))
