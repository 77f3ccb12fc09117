"""Asks: what request number N of a plan says. The same seed gives the same words, in whatever order they are asked for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from slimproc.bench.plan import Plan

_WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which one"
    " you were her all she there would their we him been has when who will more no if out so said what up its about into"
    " than them can only other new some could time these two may then do first any my now such like our over man me even"
    " most made after also did many before must through back years where much your way well down should because each just"
    " those people how too little state good very make world still own see men work long get here between both life being"
    " under never day same another know while last might us great old year off come since against go came right used take"
)
_LIST = tuple(_WORDS.split())
_json = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Ask:
    body: bytes
    leave_after: int | None
    """Events after which the client goes away; None: it stays."""


class Asks:
    """``salt`` tells this run from every other, so that no prompt was seen before by a server's prefix cache; it is no
    part of the seed for that reason.
    """

    def __init__(self, plan: Plan, *, model: str | None, salt: str) -> None:
        self._plan = plan
        self._salt = salt
        self._common: dict[str, Any] = {"model": model} if model is not None else {}
        self._common |= {"max_tokens": plan.max_tokens, "stream": plan.stream}
        if plan.stream and plan.usage:
            self._common["stream_options"] = {"include_usage": True}
        self._common |= plan.fields
        self._prefixes = [
            f"p{number}.{salt} {_words(_chance(f'{plan.seed} prefix {number}'), plan.shared_prefix)}"
            for number in range(plan.prefixes if plan.shared_prefix else 0)
        ]

    def ask(self, number: int) -> Ask:
        plan = self._plan
        chance = _chance(f"{plan.seed} request {number}")
        prompt = f"{number}.{self._salt} {_words(chance, plan.prompt_words)}".rstrip()
        if self._prefixes:
            prompt = f"{chance.choice(self._prefixes)} {prompt}"
        said = {"messages": [{"role": "user", "content": prompt}]} if plan.chat else {"prompt": prompt}
        leaves = chance.random() < plan.cancel
        return Ask(_json(said | self._common), chance.randint(1, max(1, plan.max_tokens - 1)) if leaves else None)


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Seconds from the start at which requests arrive: a Poisson process."""
    chance = _chance(f"{seed} arrivals")
    at = 0.0
    while True:
        at += chance.expovariate(rate)
        yield at


def _chance(seed: str) -> random.Random:
    return random.Random(seed)  # noqa: S311 - it must come out alike again


def _words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(_LIST, k=count))
