"""Log probabilities from a row of logits, in numpy, for the backends that have logits."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from slimproc.engines.scores import Score

Floats = npt.NDArray[np.float32]


def score(logits: Floats, token: int, piece: bytes, count: int, spelled: Callable[[int], bytes]) -> Score:
    """What ``logits`` (one row, as the model gave them; left as they are) say of ``token`` and of the ``count``
    likeliest tokens, whose bytes ``spelled`` gives. Of equally likely tokens the lower ids come first.
    """
    logprobs = log_softmax(logits)
    top = [(spelled(one), float(logprobs[one])) for one in likeliest(logprobs, count)]
    return Score(piece, float(logprobs[token]), top)


def log_softmax(logits: Floats) -> Floats:
    """Natural log probabilities of one row; all NaN when the largest logit is not finite."""
    peak = logits.max()
    if not math.isfinite(peak):
        return np.full_like(logits, np.nan)
    shifted: Floats = logits - peak
    total = np.exp(shifted).sum(dtype=np.float64)
    shifted -= np.float32(math.log(total))
    return shifted


def likeliest(logprobs: Floats, count: int) -> list[int]:
    """The ids of the ``count`` largest (all, if there are fewer), the largest first."""
    count = min(count, len(logprobs))
    if not count:
        return []
    ids = np.argpartition(logprobs, len(logprobs) - count)[len(logprobs) - count :]
    order: list[int] = ids[np.lexsort((ids, -logprobs[ids]))].tolist()
    return order
