"""RequestQueue: who waits for one model, oldest first. No clock and no loop; the controller acts on what it says."""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """A request some of whose sequences have no slot yet."""

    @property
    def started(self) -> bool:
        """It has had a slot: it no longer counts as waiting, though more of its sequences may want one."""

    @property
    def unstarted(self) -> int:
        """Sequences that want a slot."""

    @property
    def arrived(self) -> float:
        """The instant that gives it its place."""


T = TypeVar("T", bound=Waiting)


class RequestQueue(Generic[T]):
    """First in, first out by request. A request stays at its place until its last sequence has a slot: it never holds
    slots while it waits for more, and nobody younger gets in between.
    """

    def __init__(self) -> None:
        self._requests: deque[T] = deque()

    def __len__(self) -> int:
        """Requests that wait, by the count that ``max_queue`` limits."""
        return sum(not request.started for request in self._requests)

    @property
    def requests(self) -> int:
        """Requests that want a slot, also those that have had one before."""
        return len(self._requests)

    def append(self, request: T) -> None:
        self._requests.append(request)

    def put_back(self, request: T) -> None:
        """To its old place, which is before all that came later: its engine died before it gave a byte."""
        if request not in self._requests:
            older = sum(other.arrived <= request.arrived for other in self._requests)
            self._requests.insert(older, request)

    def head(self) -> T | None:
        return self._requests[0] if self._requests else None

    def taken(self, request: T) -> None:
        """``request`` has got a slot; once it wants no more, it is off the queue."""
        if request.unstarted == 0:
            self.discard(request)

    def discard(self, request: T) -> bool:
        """Take it off, if it is there: it was cancelled, expired, or has all its slots. True: it was there."""
        if request not in self._requests:
            return False
        self._requests.remove(request)
        return True

    def waiting(self) -> list[T]:
        """Those that have had no slot yet, oldest first."""
        return [request for request in self._requests if not request.started]

    def all(self) -> list[T]:
        """All that want a slot, oldest first."""
        return list(self._requests)

    def drain(self) -> list[T]:
        """Take all off, oldest first."""
        requests = list(self._requests)
        self._requests.clear()
        return requests
