"""Quantiles of plain and of weighted values: the smallest value that at least that share of them does not exceed."""

from __future__ import annotations

import math
from collections.abc import Sequence


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """``ordered``: ascending. None of nothing."""
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def weighted_quantile(pairs: Sequence[tuple[float, int]], share: float) -> float | None:
    """``pairs``: values, ascending, with how often each came."""
    left = max(1, math.ceil(share * sum(times for _, times in pairs)))
    for value, times in pairs:
        left -= times
        if times and left <= 0:
            return value
    return None
