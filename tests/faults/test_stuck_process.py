"""A process that not even SIGKILL ends, as one that hangs in a driver: an operator sees it, and nobody waits for it."""

from __future__ import annotations

import os
import signal

import pytest

from tests.faults.leftovers import Leftovers, all_gone
from tests.faults.planted import plant
from tests.serving import script, wait_until

pytestmark = pytest.mark.slow

DEAF = """
if _front:
    import slimproc.replicas.owner
    slimproc.replicas.owner.KILL_LIMIT = 0.5
    _kill = os.kill

    def _kill_all_but_engines(pid, number):
        with open(f"/proc/{pid}/cmdline") as command:
            if number != signal.SIGKILL or "slimproc.engines" not in command.read():
                _kill(pid, number)

    os.kill = _kill_all_but_engines
"""
"""No process of ours hangs in a kernel on demand: instead, the front's SIGKILL to an engine goes nowhere. Engines are
stopped, so that they hear nothing else either.
"""


def hung(serve, tmp_path):
    """A server with two models, of which a third can be asked for; the first one's engine is about to be stopped."""
    one = {"backend": "fake", "slots": 1, "context": 1_000_000}
    config = {"models": {"hung": one, "well": one, "later": one}, "preload": ["hung", "well"]}
    return serve(config | {"stall_timeout": 1, "log_json": True}, **plant(tmp_path, DEAF))


def stop_in_mid_stream(server) -> int:
    """Until it has been given up; its process."""
    pid = server.replica(0)["pid"]
    with server.stream(script(token_latency=0.01), model="hung", max_tokens=900_000) as stream:
        stream.take(2)
        queued = server.begin(script(tokens=["next"]), model="hung")
        server.wait_queued(1, "hung")
        os.kill(pid, signal.SIGSTOP)
        *_, error, done = stream.events()
    assert (error["error"]["code"], done) == ("engine_crashed", "[DONE]")
    refused = queued.answer()
    assert refused.status == 503
    assert f"process {pid} does not end after SIGKILL" in refused.error["message"]
    return pid


def test_a_process_that_nothing_ends_is_told_everywhere_and_holds_up_nobody_and_its_model_is_back_when_it_has_ended(
    serve, tmp_path
):
    server = hung(serve, tmp_path)
    leftovers = Leftovers(server)
    pid = stop_in_mid_stream(server)
    words = f"process {pid} does not end after SIGKILL"

    ready = server.get("/readyz")
    assert ready.status == 503
    assert words in ready.json["models"]["hung"]["reason"]
    assert ready.json["models"]["well"]["ready"]
    shown = server.replica(0)
    assert (shown["state"], shown["pid"], words in shown["reason"]) == ("killing", pid, True)
    assert [server.metric("stuck_processes", model=model) for model in ("hung", "well")] == [1, 0]
    assert [line["pid"] for line in server.records("a process does not end", replica="hung/0")] == [pid]
    assert server.complete("hi", model="hung", max_tokens=1).status == 503, "at once, and not after its deadline"
    assert words in server.admin("/admin/models/hung/unload?wait=true", "POST")["error"]["message"]
    assert server.complete("hi", model="well", max_tokens=1).status == 200
    assert server.complete("hi", model="later", max_tokens=1).status == 200, "others are loaded beside it"

    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: server.replica(0)["state"] != "stopping", "it has ended")
    assert server.complete("hi", model="hung", max_tokens=1).status == 200
    assert server.metric("stuck_processes", model="hung") == 0
    server.admin("/admin/models/later/unload?wait=true", "POST")
    leftovers.assert_none()


@pytest.mark.parametrize("when", ["before", "in its end"])
def test_a_shutdown_does_not_wait_for_a_process_that_nothing_ends(serve, tmp_path, when):
    server = hung(serve, tmp_path)
    children = server.children()
    if when == "before":
        stop_in_mid_stream(server)
    else:
        os.kill(server.replica(0)["pid"], signal.SIGSTOP)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
    all_gone(children)  # the kernel's SIGKILL for who has lost his parent is a real one
    assert len(server.records("a process does not end", replica="hung/0")) == 1
    assert "Traceback" not in server.log
