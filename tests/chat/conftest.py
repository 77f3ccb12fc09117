"""Event loops and renderers for the tests of the child process."""

import asyncio

import pytest
import uvloop

from slimproc.chat.templates import Renderer


@pytest.fixture(scope="module")
def loop():
    """Runs coroutines, each for at most a minute, on one uvloop, which is what the front runs on."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        yield lambda work: runner.run(asyncio.wait_for(work, 60.0))


@pytest.fixture(scope="module")
def shared(loop):
    """``render(template, messages)`` of one renderer; its limits are generous, for slow machines."""
    renderer = Renderer(time_limit=10.0, prepare_limit=30.0, start_limit=60.0, processes=1)
    loop(renderer.start())
    yield lambda template, messages: loop(renderer.render(template, messages))
    loop(renderer.close())
