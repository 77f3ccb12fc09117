"""Scorekeeper: the log probabilities of one sequence's tokens, held until the text of their tokens goes out."""

from __future__ import annotations

import codecs
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from slimproc.ipc.joined import logprob_bytes
from slimproc.ipc.wire import Logprob, ScoredTok, Tok

if TYPE_CHECKING:
    from collections.abc import Iterator


FLOOR: Final = -9999.0
"""What stands for minus infinity and NaN, for which JSON has no word (vLLM's number)."""
LONGEST_PIECE: Final = 512
"""Bytes, of a token. What hardly any vocabulary has is cut: with 20 alternatives it must fit in half a frame of the
smallest ring."""
LONGEST_ALTERNATIVE: Final = 128
_TOGETHER: Final = 2048
"""Bytes of log probabilities that go out as one item; a single token's may be more."""


class Score(NamedTuple):
    """One token's log probability under the model as it is: before temperature, penalties, biases and grammar.

    ``top``: the likeliest tokens in its place (bytes, log probability), the likeliest first. Minus infinity and NaN are
    allowed anywhere; None is the first token of a prompt, which nothing came before.
    """

    piece: bytes
    logprob: float | None
    top: list[tuple[bytes, float]]


class Scorekeeper:
    """One sequence's. A token is reported with the first text that is its own or comes after it; never if that is
    behind a stop string.
    """

    __slots__ = ("_decoder", "_held", "_position", "_said")

    def __init__(self) -> None:
        self._held: list[Logprob] = []
        self._said = 0
        """Characters that have gone out, an echo's too."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._position = 0
        """Characters of the echo's tokens so far."""

    def note(self, score: Score, waiting: int) -> None:
        """Take a new token. ``waiting``: whole characters before it that have not gone out."""
        self._held.append(_logprob(score, self._said + waiting))

    def release(self, item: Tok, *, stopped: bool = False) -> list[ScoredTok]:
        """``item`` with the log probabilities of its text, as one item or (many tokens at once) as several.

        The end of a sequence takes all that is held with it, but not when it was ``stopped``: then the rest is behind
        the stop string.
        """
        return self._release(item, everything=item.finish > 0 and not stopped)

    def echo(self, rid: int, text: str, scores: list[Score], *, last: bool) -> list[ScoredTok]:
        """The next part of the echo of the prompt, which is ``text`` as a whole. Before anything else."""
        for score in scores:
            # Not beyond the text, should a tokenizer have changed what it was given.
            one = _logprob(score, min(self._position, len(text)))
            characters = self._decoder.decode(score.piece)
            if score.logprob is None and not text.startswith(characters):  # a BOS that the tokenizer put there
                one.piece, characters = b"", ""
                self._decoder.reset()
            self._held.append(one)
            self._position += len(characters)
        end = None if last else self._position
        return self._release(Tok(rid, text[self._said : end], 0), everything=last)

    def _release(self, item: Tok, *, everything: bool) -> list[ScoredTok]:
        begin = self._said
        self._said += len(item.text)
        if everything:
            count = len(self._held)
        else:
            count = next((at for at, one in enumerate(self._held) if one.offset >= self._said), len(self._held))
        ready = self._held[:count]
        del self._held[:count]
        return list(_parts(item, begin, ready))


def _logprob(score: Score, offset: int) -> Logprob:
    top = [(piece[:LONGEST_ALTERNATIVE], _finite(logprob)) for piece, logprob in score.top]
    own = None if score.logprob is None else _finite(score.logprob)
    return Logprob(score.piece[:LONGEST_PIECE], own, top, offset)


def _finite(logprob: float) -> float:
    """From FLOOR to 0, which rounding may have passed. NaN compares false."""
    return min(logprob, 0.0) if logprob > FLOOR else FLOOR


def _parts(item: Tok, begin: int, ready: list[Logprob]) -> Iterator[ScoredTok]:
    """``item``, whose text begins at ``begin``, cut where a token begins; its tokens and its end are the last part's."""
    groups = list(_groups(ready)) or [[]]
    done = 0
    for group, following in pairwise(groups):
        cut = following[0].offset - begin
        yield ScoredTok(item.rid, item.text[done:cut], 0, logprobs=group)
        done = max(done, cut)
    yield ScoredTok(item.rid, item.text[done:], item.tokens, item.finish, item.usage, groups[-1])


def _groups(ready: list[Logprob]) -> Iterator[list[Logprob]]:
    group: list[Logprob] = []
    room = _TOGETHER
    for one in ready:
        size = logprob_bytes(one)
        if group and size > room:
            yield group
            group, room = [], _TOGETHER
        group.append(one)
        room -= size
    if group:
        yield group
