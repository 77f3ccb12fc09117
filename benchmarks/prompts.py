"""Prompts made of common words, each about one token in most vocabularies, the same for both sides of a ratio."""

from __future__ import annotations

import random

_WORDS = (
    "the of and to in is that it was for on are with as his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most know"
)


def prompt(words: int, seed: int) -> str:
    """So many words, the same for the same ``seed``, which is also its beginning: no two seeds share a prefix."""
    chosen = random.Random(seed)
    return f"{seed}: " + " ".join(chosen.choices(_WORDS.split(), k=words))
