"""Servers for the fault tests: as many of one's own as a test likes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving import ServerProcess

ROOM = 128 << 20


@pytest.fixture
def serve(tmp_path):
    """As in the end-to-end tests. Every model is held with the same bytes whatever it is seen to use, so that those who
    count what is held before and after a fault count the same.
    """
    running = []

    def start(config, *, wait=True, **options):
        profile = {"load_peak": ROOM, "inference_peak": ROOM}
        models = {
            name: model if model.get("fake", {}).get("bytes") else model | {"memory": dict(profile)}
            for name, model in config["models"].items()
        }
        running.append(ServerProcess(tmp_path / f"server{len(running)}", config | {"models": models}, **options))
        return running[-1].wait_ready() if wait else running[-1]

    yield start
    for server in running:
        server.close()


def pytest_collection_modifyitems(items):
    """Each waits for whole servers and their deaths: all of them go with the slow tests."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slow)
