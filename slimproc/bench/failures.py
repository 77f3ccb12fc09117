"""What ends a benchmark before its time: a plan that makes no sense, and a server that is not there."""

from __future__ import annotations


class BadPlan(ValueError):
    """What was asked for cannot be done; the message names the option, in one line."""


class Unreachable(Exception):
    """Nobody, or nobody who speaks HTTP, answers at the URL; the message is one line."""
