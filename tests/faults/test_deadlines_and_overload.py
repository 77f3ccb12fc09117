"""Deadlines wherever a request is, and ten times more requests than there is room for."""

from __future__ import annotations

import threading
import time

import psutil
import pytest

from tests.faults.leftovers import Leftovers, ended_once
from tests.serving import fake, script

pytestmark = pytest.mark.slow

SOON = {"x-request-timeout": "0.5"}
ENDLESS = script(token_latency=0.01)


@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline_in_the_queue_in_prefill_and_in_mid_answer_is_told_and_frees_the_slot_each_time(serve, stream):
    server = serve(fake(slots=1, context=1_000_000) | {"log_json": True})
    leftovers = Leftovers(server)
    with server.stream(ENDLESS, max_tokens=900_000) as running:
        running.take(1)
        queued = server.begin(script(die_at=1), headers=SOON, stream=stream).answer()
    prefill = server.begin(script(prefill_steps=10_000, prefill_latency=0.01), headers=SOON, stream=stream).answer()
    assert [(one.status, one.error["code"]) for one in (queued, prefill)] == [(504, "timeout")] * 2
    late = server.begin(ENDLESS, headers=SOON, stream=stream, max_tokens=900_000)
    if stream:
        *_, error, done = late.events().events()
        assert (error["error"]["code"], done) == ("timeout", "[DONE]")
    else:
        assert late.answer().status == 504
    ended_once(server, 4)
    assert len(server.records("generation finished", outcome="timeout")) == 3
    leftovers.assert_none()
    assert server.replica()["restarts"] == 0, "who timed out in the queue never reached the engine"


SLOTS, QUEUE, TAKES = 2, 4, 0.4
"""An answer takes so many seconds, so that five a second can be served."""


def test_at_ten_times_the_capacity_the_admitted_are_served_whole_and_in_time_and_the_rest_is_refused_at_once(serve):
    """An open loop: requests come when they come, whatever became of those before them. Afterwards it is as if nothing had been."""
    server = serve(fake(slots=SLOTS, max_queue=QUEUE) | {"log_json": True})
    leftovers = Leftovers(server)
    front = psutil.Process(server.process.pid)
    told = script(tokens=["x"], repeat=20, token_latency=TAKES / 20)
    assert server.complete(told, max_tokens=100).status == 200
    memory = front.memory_info().rss
    answers, lock = [], threading.Lock()

    def ask() -> None:
        began = time.monotonic()
        answer = server.complete(told, max_tokens=100)
        with lock:
            answers.append((answer, time.monotonic() - began))

    threads = []
    due = time.monotonic()
    for _ in range(200):
        due += TAKES / SLOTS / 10
        time.sleep(max(0.0, due - time.monotonic()))
        threads.append(threading.Thread(target=ask))
        threads[-1].start()
    for thread in threads:
        thread.join()

    served = [(answer, took) for answer, took in answers if answer.status == 200]
    refused = [(answer, took) for answer, took in answers if answer.status != 200]
    assert len(served) + len(refused) == 200
    assert len(served) >= 10, "the slots were never idle for long: 20 are what they can do in that time"
    assert all(answer.text == "x" * 20 for answer, _ in served)
    assert all((answer.status, answer.error["code"]) == (503, "overloaded") for answer, _ in refused)
    assert all(1 <= int(answer.headers["Retry-After"]) <= 60 for answer, _ in refused)
    bound = TAKES * (1 + QUEUE / SLOTS)
    assert max(took for _, took in served) < bound + 5, "nobody who was admitted waits longer than the queue is long"
    assert sorted(took for _, took in refused)[len(refused) // 2] < TAKES / 2, "a refusal waits for nobody"
    assert front.memory_info().rss - memory < 32 << 20
    server.wait_idle()
    assert server.complete(told, max_tokens=100).status == 200, "it has recovered"
    ended_once(server, len(served) + 2)
    leftovers.assert_none()
