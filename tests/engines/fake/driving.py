"""Drives a fake backend as the engine's loop does, on a clock that only a test moves."""

import json
import random

from slimproc.engines.backend import SequenceFailed
from slimproc.engines.sequence import Sequence
from slimproc.ipc.wire import Submit

CONTEXT = 100_000


class Clock:
    """Monotonic seconds that pass only when a test or a sleep says so."""

    def __init__(self):
        self.now = 1000.0
        self.slept = []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


class Hung(Exception):
    """Raised out of a sleep that would never end."""


def add(backend, prompt="hello", **options):
    command = Submit(rid=random.randrange(1 << 30), prompt=prompt, **options)
    tokens = prompt
    if isinstance(prompt, str):
        tokens = backend.tokenize(prompt, add_special=True, parse_special=True)
    sequence = Sequence(command, tokens, CONTEXT)
    backend.add(sequence)
    return sequence


def script(**keys):
    return "!fake " + json.dumps(keys)


def run(backend, clock, *, steps=10_000):
    """Step like the loop does, letting time pass as ``poll_interval`` says. The pieces with their times, per sequence."""
    heard = {}
    for _ in range(steps):
        if backend.poll_interval is None:
            return heard
        clock.now += backend.poll_interval
        for event in backend.step():
            heard.setdefault(event.sequence, []).append((clock.now, event))
            if isinstance(event, SequenceFailed) or event.end:
                backend.remove(event.sequence)
    return heard


def pieces(backend, clock, prompt, **options):
    steps = options.pop("steps", 10_000)
    sequence = add(backend, prompt, **options)
    return [event.piece for _, event in run(backend, clock, steps=steps).get(sequence, [])]


def times(heard, sequence):
    """When the tokens came, in seconds from the clock's beginning."""
    return [at - 1000.0 for at, _ in heard[sequence]]
