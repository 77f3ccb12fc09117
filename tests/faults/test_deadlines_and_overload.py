"""Deadlines wherever a request is, and ten times more requests than there is room for."""

from __future__ import annotations

import threading

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


def test_at_ten_times_the_capacity_the_admitted_are_served_whole_and_the_rest_is_refused_before_any_of_them_ends(serve):
    server = serve(fake(slots=2, max_queue=4) | {"log_json": True})
    leftovers = Leftovers(server)
    front = psutil.Process(server.process.pid)
    memory = front.memory_info().rss
    slow = script(tokens=["x"], repeat=20, token_latency=0.05)
    pending = [server.begin(slow, max_tokens=100) for _ in range(60)]
    order, answers, lock = [], [], threading.Lock()

    def wait(one) -> None:
        answer = one.answer()
        with lock:
            order.append(answer.status)
            answers.append(answer)

    threads = [threading.Thread(target=wait, args=(one,)) for one in pending]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(set(order)) == [200, 503]
    served = [answer for answer in answers if answer.status == 200]
    refused = [answer for answer in answers if answer.status == 503]
    assert len(served) >= 6, "two slots and four places"
    assert all(answer.text == "x" * 20 for answer in served)
    assert all(answer.error["code"] == "overloaded" for answer in refused)
    assert all(1 <= int(answer.headers["Retry-After"]) <= 60 for answer in refused)
    first_served = order.index(200)
    assert order[:first_served].count(503) > len(refused) / 2, "a refusal waits for nobody"
    assert front.memory_info().rss - memory < 32 << 20
    ended_once(server, len(served))
    leftovers.assert_none()
