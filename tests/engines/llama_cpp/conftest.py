"""Models of the llama_cpp tests, written once a session, and engines that are closed when a test ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from slimproc.engines.backend import create
from slimproc.settings import EngineSettings
from tests.engines.driver import Engine
from tests.models import scripted, tiny_random


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_random(folder / "tiny.gguf")
    tiny_random(folder / "bos.gguf", bos=True)
    scripted(folder / "scripted.gguf")
    return folder


@pytest.fixture
def settings(models):
    def make(path: str | Path = "tiny.gguf", **changes) -> EngineSettings:
        values = {"slots": 4, "context": 256, "threads": 1, **changes}
        return EngineSettings(model="m", backend="llama_cpp", path=str(models / path), **values)

    return make


@pytest.fixture
def open_engine(settings):
    opened: list[Engine] = []

    def make(path: str | Path = "tiny.gguf", **changes) -> Engine:
        opened.append(Engine(create(settings(path, **changes))))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()
