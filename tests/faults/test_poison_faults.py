"""A request that kills whichever engine has it."""

from __future__ import annotations

import signal

from tests.faults.leftovers import Leftovers
from tests.serving import fake, script


def test_a_poison_request_costs_two_engines_and_then_itself_and_who_waited_behind_it_is_served(serve):
    server = serve(fake(slots=1) | {"log_json": True})
    leftovers = Leftovers(server)
    poison = server.begin(script(die_at=1, signal=int(signal.SIGSEGV)), headers={"x-request-id": "poison"})
    innocent = server.begin(script(tokens=["served"]))
    answer = poison.answer()
    assert (answer.status, answer.error["code"]) == (500, "engine_crashed")
    assert answer.headers["x-should-retry"] == "false"
    assert innocent.answer().text == "served"
    assert server.replica()["restarts"] == 2
    assert len(server.records("generation finished", request_id="poison", outcome="engine_crashed")) == 1

    pid = server.wait_ready().replica()["pid"]
    again = server.complete(script(die_at=1, signal=int(signal.SIGSEGV)))
    assert (again.status, again.error["code"]) == (500, "engine_crashed")
    assert "killed two engines" in again.error["message"]
    assert server.complete(script(tokens=["served"])).text == "served", "only the same work is refused"
    assert (server.replica()["pid"], server.replica()["restarts"]) == (pid, 2), "no third engine is charged for it"
    assert server.metric("rejected_total", reason="poison") == 1
    leftovers.assert_none()
