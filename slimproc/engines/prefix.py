"""What two prompts have in common: how backends find what they need not read again."""

from __future__ import annotations


def common_prefix(one: list[int], other: list[int]) -> int:
    """How many tokens the two have in common at their beginning."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # comparing slices is native code: faster than a loop even over most lengths twice
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
