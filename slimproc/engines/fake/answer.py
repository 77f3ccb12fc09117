"""One sequence's answer as an iterator: each ``next`` is one token, or the fault that was scripted for its place.

Everything between two special places is a chain of itertools, so that a token costs no Python frame: flat out, the
backend must be faster than anything that is measured with it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from itertools import chain, count, islice, repeat
from typing import TYPE_CHECKING, Final

from slimproc.engines.backend import Embedded, Event, Produced, SequenceFailed
from slimproc.engines.fake.vectors import vector_of
from slimproc.engines.pooled import PooledSequence

if TYPE_CHECKING:
    from slimproc.engines.fake.script import Script
    from slimproc.engines.sequence import Sequence

_PIECES: Final = [b" tok%d" % index for index in range(32_768)]
"""Formatting costs as much as the rest of a token, so the first ones are made once (4 ms, 1.4 MB)."""
_WORD: Final = re.compile(r"\s*\S{1,16}|\s+")
_HANG: Final = 3600.0


def answer(
    sequence: Sequence,
    script: Script,
    prompt: str,
    *,
    ended: Callable[[Sequence], None],
    spins: Callable[[Sequence], None],
    sleep: Callable[[float], None],
) -> Iterator[Event]:
    """The events of ``sequence``, in order. ``ended`` is called just before its last one; ask for no more after it.

    ``spins`` is called just before an event that is none, after which there is no other. ``sleep`` is what a scripted
    hang does for ever.
    """
    if isinstance(sequence, PooledSequence):
        events = _vector(sequence, ended)
    else:
        events = _tokens(sequence, script, prompt, ended)
    given = sequence.spoken
    if given:
        events = islice(events, given, None)
    faults: list[tuple[int, Iterator[Event]]] = []
    if script.die_at is not None:
        faults.append((script.die_at, _die(script.signal)))
    if script.hang_at is not None:
        faults.append((script.hang_at, _hang(sleep)))
    if script.spin is not None:
        faults.append((script.spin, _spin(sequence, spins)))
    if script.error_at is not None:
        faults.append((script.error_at, _fail(sequence, script.error_at, ended)))
    parts: list[Iterator[Event]] = []
    for place, fault in sorted((fault for fault in faults if fault[0] > given), key=lambda item: item[0]):
        parts += [islice(events, place - 1 - given), fault]
        given = place - 1
    return chain(*parts, events) if parts else events


def _vector(sequence: PooledSequence, ended: Callable[[Sequence], None]) -> Iterator[Event]:
    """All that comes of it, in the place of a first token."""
    ended(sequence)
    yield Embedded(sequence, vector_of(sequence))


def _tokens(sequence: Sequence, script: Script, prompt: str, ended: Callable[[Sequence], None]) -> Iterator[Event]:
    pieces = _scripted_pieces(script, prompt)
    if pieces is None:
        endless = chain(_PIECES, map(b" tok%d".__mod__, count(len(_PIECES))))
        # Produced._make without its Python frame: half the cost of a token.
        return map(tuple.__new__, repeat(Produced), zip(repeat(sequence), endless, repeat(False)))
    once = [Produced(sequence, piece) for piece in pieces]
    if not once:
        return _last(Produced(sequence, b"", end=True), ended)
    if sequence.sampling.ignore_eos:
        return chain.from_iterable(repeat(once))
    end = _last(once[-1]._replace(end=True), ended)
    return chain(chain.from_iterable(repeat(once, script.repeat - 1)), once[:-1], end)


def _scripted_pieces(script: Script, prompt: str) -> list[bytes] | None:
    if script.echo:
        return [word.encode() for word in _WORD.findall(prompt)]
    if script.tokens is None:
        return None
    return [token.encode() if isinstance(token, str) else bytes.fromhex(token.hex) for token in script.tokens]


def _last(event: Produced, ended: Callable[[Sequence], None]) -> Iterator[Event]:
    ended(event.sequence)
    yield event


def _die(signal: int) -> Iterator[Event]:
    os.kill(os.getpid(), signal)
    yield from ()


def _hang(sleep: Callable[[float], None]) -> Iterator[Event]:
    while True:
        sleep(_HANG)
    yield from ()  # never reached: it makes this a generator, so that the hang begins when the token is asked for


def _spin(sequence: Sequence, spins: Callable[[Sequence], None]) -> Iterator[Event]:
    spins(sequence)
    yield Produced(sequence, b"")


def _fail(sequence: Sequence, place: int, ended: Callable[[Sequence], None]) -> Iterator[Event]:
    ended(sequence)
    yield SequenceFailed(sequence, f"the script failed this sequence at token {place}")
