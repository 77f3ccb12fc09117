"""How a measurement comes to nothing; each is one line for people."""

from __future__ import annotations


class BadAsk(Exception):
    """The command line makes no sense for this model."""


class CannotMeasure(Exception):
    """The model or the machine does not do its part; or it would disturb what runs."""
