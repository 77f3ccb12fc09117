"""The fake backend: deterministic tokens, set latencies and scripted faults, in a real process on the real ring.

A product feature, not a mock: the server is tested with it, and its overhead measured.
"""

from slimproc.engines.fake.backend import FakeBackend

__all__ = ["FakeBackend"]
