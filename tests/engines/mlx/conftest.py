"""Engines on the MLX backend, and the tiny models that they run, both made once. Without mlx-lm all here is skipped, but
where CI is set, which would stay green: there it fails.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from slimproc.engines.backend import create
from slimproc.settings import EngineSettings
from tests.engines.driver import Engine

if importlib.util.find_spec("mlx_lm") is not None:
    from tests.mlx_models import mlx_scripted, mlx_tiny_random
else:

    class Skipped(pytest.Module):
        def collect(self):
            missing = "mlx-lm is not installed: pip install -e '.[mlx]'"
            if os.environ.get("CI"):
                pytest.fail(missing)
            pytest.skip(missing, allow_module_level=True)

    def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
        return Skipped.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mlx_tiny_random(tmp_path_factory.mktemp("mlx") / "random")


@pytest.fixture(scope="session")
def scripted_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mlx_scripted(tmp_path_factory.mktemp("mlx") / "scripted")


@pytest.fixture
def open_mlx():
    """``open_mlx(path, slots=4, context=256)``: an engine that is closed when the test ends."""
    opened: list[Engine] = []

    def open_engine(path: Path, *, slots: int = 4, context: int | None = 256, backend: str = "mlx") -> Engine:
        settings = EngineSettings(
            model="tiny", backend=backend, path=str(path), slots=slots, context=context, threads=1
        )
        opened.append(Engine(create(settings)))
        return opened[-1]

    yield open_engine
    for engine in opened:
        engine.close()
