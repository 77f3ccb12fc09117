"""Draws a token from weights, in numpy, as top-k, top-p and min-p leave them. Pure: chances come in as numbers.

The vocabulary is some 50,000 to 250,000 tokens, and this is done once a token: what looks at all of them is vectorized, and
nothing sorts them all where a few hundred do.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from slimproc.request import SamplingParams

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_BLOCK = 256
"""Sums of blocks are vectorized and a running sum over all weights is not: finding a draw costs a tenth this way."""
_TRIES = 3
_LOWEST = np.finfo(np.float32).min


def shortlist(row: Floats, count: int) -> Ids | None:
    """The ids of the ``count`` largest logits, their equals and some more, ascending; without those that are ruled out.

    None: a list would not be short, or there is no choice. So many blocks have a peak from the ``count``-th largest peak on,
    that this is a floor for the ``count``-th largest of all.
    """
    if len(row) < 2 * count * _BLOCK:
        return None
    peaks = np.maximum.reduceat(row, np.arange(0, len(row), _BLOCK))
    if not math.isfinite(peaks.max()):
        return None
    floor = np.partition(peaks, len(peaks) - count)[len(peaks) - count]
    return np.flatnonzero(row >= max(floor, _LOWEST))


def draw(weights: Floats, chance: float) -> int:
    """The id that ``chance`` (from 0, below 1) falls on, each id taking as much of the whole as it weighs."""
    sums = _block_sums(weights)
    return _find(weights, sums, chance * sums[-1])


def draw_limited(weights: Floats, params: SamplingParams, chance: float) -> int:
    """As ``draw``, among what top-k, then top-p, then min-p leave; at least one token. The largest weight is 1.

    Each limit leaves the heaviest so-and-so many of what the one before left, so one sorted list of weights is all
    there is to know; ids come in only for the token that was drawn. Of equal weights the lower ids come first.
    """
    size, top_k = len(weights), params.top_k
    left = np.partition(weights, size - top_k)[size - top_k :] if 0 < top_k < size else weights
    total = float(left.sum(dtype=np.float64))
    # What weighs less than this bound cannot make up 1 - top_p of the total, all together: the nucleus is elsewhere,
    # and mostly hundreds are sorted instead of the whole vocabulary. (Where most stay, picking them costs more.)
    floor = np.float32(min(max(params.min_p, (1.0 - params.top_p) * total / len(left)), 1.0))
    stays = left >= floor
    ascending = np.sort(left[stays] if np.count_nonzero(stays) * 8 < len(left) else left)
    descending = ascending[np.searchsorted(ascending, floor) :][::-1]
    if params.top_p < 1.0:
        descending = descending[: _find(descending, _block_sums(descending), params.top_p * total) + 1]
    sums = _block_sums(descending)
    place = _find(descending, sums, chance * sums[-1])
    weight = descending[place]
    heavier = len(ascending) - int(np.searchsorted(ascending, weight, side="right"))
    return int(np.flatnonzero(weights == weight)[place - heavier])


def draw_mostly_inside(weights: Floats, params: SamplingParams, random: Callable[[], float]) -> int:
    """As ``draw_limited`` without a top-k, for limits that most draws keep: to ask whether a token is inside them costs a
    fifth of finding their border. A draw that is outside is drawn again, so that each token inside has its share.
    """
    sums = _block_sums(weights)
    total = float(sums[-1])
    for _ in range(_TRIES):
        token = _find(weights, sums, random() * total)
        if _inside(weights, token, params, total):
            return token
    return draw_limited(weights, params, random())


def _inside(weights: Floats, token: int, params: SamplingParams, total: float) -> bool:
    weight = weights[token]
    if weight < params.min_p:
        return False
    if params.top_p >= 1.0 or weight > (1.0 - params.top_p) * total:
        return True  # what is outside makes up 1 - top_p at most, all together
    heavier = float((weights * (weights > weight)).sum())
    equals_before = np.count_nonzero(weights[:token] == weight)
    return heavier + int(equals_before) * float(weight) < params.top_p * total


def _block_sums(weights: Floats) -> npt.NDArray[np.float64]:
    """The running sum at the end of each block."""
    return np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)).astype(np.float64))


def _find(weights: Floats, sums: npt.NDArray[np.float64], target: float) -> int:
    """The first place where the running sum of ``weights`` reaches ``target`` (or passes 0); never one that weighs 0."""
    # A hair less: so that reaching is enough, and a target rounded up to the whole sum is still found.
    target = max(float(np.nextafter(min(target, sums[-1]), 0.0)), 0.0)
    block = int(np.searchsorted(sums, target, side="right"))
    begin = block * _BLOCK
    within = weights[begin : begin + _BLOCK].astype(np.float64)
    before = sums[block - 1] if block else 0.0
    place = int(np.searchsorted(np.cumsum(within), target - before, side="right"))
    if place == len(within):  # the block's sum is rounded to f32: the target lies in the crack before the next block
        place = int(np.flatnonzero(within)[-1])
    return begin + place
