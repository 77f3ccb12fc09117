"""The fake backend's vectors and ranks: the same text always has the same, and no model is needed for either."""

from __future__ import annotations

import hashlib
import math
import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from slimproc.engines.pooled import PooledSequence

SIZE: Final = 8
"""Values of a vector."""


def vector_of(sequence: PooledSequence) -> bytes:
    """Little-endian float32: of length 1 and made of a hash of the token ids; or the rank, one value."""
    if sequence.query is not None:
        return struct.pack("<f", rank(sequence.query, sequence.prompt_text))
    ids = sequence.prompt
    digest = hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).digest()
    values = [number / 2**31 for number in struct.unpack("<8i", digest)][: sequence.dimensions]
    norm = math.hypot(*values) or 1.0
    return struct.pack(f"<{len(values)}f", *(value / norm for value in values))


def rank(query: str, document: str) -> float:
    """The share of the query's words that the document has, from 0 to 1."""
    words = set(query.lower().split())
    return len(words & set(document.lower().split())) / max(1, len(words))
