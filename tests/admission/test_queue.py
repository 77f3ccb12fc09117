"""RequestQueue: first in, first out, by request."""

from __future__ import annotations

from dataclasses import dataclass

from slimproc.admission.queue import RequestQueue


@dataclass(eq=False)
class Request:
    arrived: float
    unstarted: int = 1
    started: bool = False

    def take(self, waiting: RequestQueue[Request]) -> None:
        self.started = True
        self.unstarted -= 1
        waiting.taken(self)


def filled(*requests: Request) -> RequestQueue[Request]:
    waiting: RequestQueue[Request] = RequestQueue()
    for request in requests:
        waiting.append(request)
    return waiting


def test_the_oldest_is_first():
    first, second = Request(1), Request(2)
    waiting = filled(first, second)
    assert waiting.head() is first
    first.take(waiting)
    assert waiting.head() is second
    second.take(waiting)
    assert waiting.head() is None


def test_a_request_keeps_its_place_until_its_last_sequence_has_a_slot():
    big, small = Request(1, unstarted=3), Request(2)
    waiting = filled(big, small)
    for _ in range(2):
        big.take(waiting)
        assert waiting.head() is big
    big.take(waiting)
    assert waiting.head() is small


def test_a_request_that_has_had_a_slot_no_longer_counts_as_waiting():
    big, small = Request(1, unstarted=2), Request(2)
    waiting = filled(big, small)
    assert len(waiting) == 2
    big.take(waiting)
    assert len(waiting) == 1
    assert waiting.waiting() == [small]


def test_one_may_leave_from_anywhere_and_more_than_once():
    requests = [Request(1), Request(2), Request(3)]
    waiting = filled(*requests)
    waiting.discard(requests[1])
    waiting.discard(requests[1])
    assert waiting.drain() == [requests[0], requests[2]]


def test_who_comes_back_gets_the_old_place_whatever_order_they_come_back_in():
    requests = [Request(float(at)) for at in range(5)]
    for order in ([0, 1], [1, 0]):
        waiting = filled(*requests)
        for place in (0, 1):
            requests[place].take(waiting)
        for place in order:
            requests[place].unstarted = 1
            waiting.put_back(requests[place])
            waiting.put_back(requests[place])
        assert waiting.drain() == requests


def test_draining_takes_all_off_oldest_first():
    requests = [Request(1), Request(2, started=True)]
    waiting = filled(*requests)
    assert waiting.drain() == requests
    assert len(waiting) == 0
    assert waiting.head() is None
