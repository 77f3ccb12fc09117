"""The processes that run chat templates are killed or hang: a request at most, never the server."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from tests.faults.leftovers import Leftovers
from tests.serving import fake, wait_until

pytestmark = pytest.mark.slow


def renderers(server) -> list[int]:
    return [child.pid for child in server.children() if "slimproc.chat.renderer" in child.cmdline()]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
def test_renderers_that_are_killed_or_stopped_are_replaced_and_chats_go_on(serve, number):
    server = serve(fake())
    assert server.chat("hi", max_tokens=1).status == 200
    wait_until(lambda: len(renderers(server)) == 2, "both run")
    leftovers = Leftovers(server)
    before = renderers(server)
    for pid in before:
        os.kill(pid, number)
    statuses = []

    def served() -> bool:
        answer = server.chat("hi", max_tokens=1)
        statuses.append(answer.status)
        assert answer.status in (200, 400, 500), "at most the request that it had is lost"
        return answer.status == 200

    wait_until(served, "a chat is answered again")
    assert len(statuses) <= 3, "two renderers, so two that are lost at most"
    if number is not signal.SIGSTOP:
        wait_until(lambda: not any(psutil.pid_exists(pid) for pid in before), "they were reaped")
    assert server.complete("hi", max_tokens=1).status == 200
    leftovers.assert_none()
