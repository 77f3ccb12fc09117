"""Servers for end-to-end tests: one shared by a module's harmless tests, and as many of one's own as a test likes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving import ServerProcess, fake

Serve = Callable[..., ServerProcess]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start a server: ``serve(config, arguments=…, wait=True)``. All are stopped when the test ends."""
    running: list[ServerProcess] = []

    def start(config: dict[str, Any], *, wait: bool = True, **options: Any) -> ServerProcess:
        server = ServerProcess(tmp_path / f"server{len(running)}", config, **options)
        running.append(server)
        return server.wait_ready() if wait else server

    yield start
    for server in running:
        server.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A fake model with four slots that answers at once."""
    with ServerProcess(tmp_path_factory.mktemp("server"), fake(slots=4, aliases=["alias"])) as process:
        yield process.wait_ready()


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A fake model whose context is 64 tokens, with four slots; and one, ``limited``, of whose answers nobody gets more than 8."""
    models = {
        "fake": {"backend": "fake", "context": 64, "slots": 4},
        "limited": {"backend": "fake", "max_tokens_limit": 8},
    }
    config = {"models": models, "default_model": "fake"}
    with ServerProcess(tmp_path_factory.mktemp("short"), config) as process:
        yield process.wait_ready()
