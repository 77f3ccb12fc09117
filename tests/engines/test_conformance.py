"""Every backend that is there passes the one suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from slimproc.engines.backend import create
from slimproc.settings import EngineSettings
from tests.engines.conformance import Conformance
from tests.engines.driver import Engine
from tests.engines.logprobs_conformance import LogprobsConformance, ModelLogprobsConformance
from tests.engines.sampling_conformance import SamplingConformance
from tests.models import tiny_random
from tests.serving import script


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_random(tmp_path_factory.mktemp("models") / "tiny.gguf")


def _opener(backend: str, path: Path | None, engines: list[Engine], **changes):
    def open_engine(*, slots: int = 4, context: int = 256) -> Engine:
        settings = EngineSettings(
            model="tiny", backend=backend, path=path and str(path), slots=slots, context=context, threads=1, **changes
        )
        engines.append(Engine(create(settings)))
        return engines[-1]

    return open_engine


@pytest.fixture
def engines():
    opened: list[Engine] = []
    yield opened
    for engine in opened:
        engine.close()


class TestLlamaCpp(ModelLogprobsConformance, SamplingConformance):
    @pytest.fixture
    def open_engine(self, tiny_model, engines):
        return _opener("llama_cpp", tiny_model, engines)


class TestLlamaCppGuessingAhead(ModelLogprobsConformance, SamplingConformance):
    """With a single token's sameness enough for a guess, so that hardly a step is without one, and most are wrong."""

    @pytest.fixture
    def open_engine(self, tiny_model, engines, monkeypatch):
        monkeypatch.setattr("slimproc.engines.llama_cpp.lookup.GRAM", 1)
        return _opener("llama_cpp", tiny_model, engines, speculation=3)


class TestFake(LogprobsConformance, Conformance):
    """Nothing of ``SamplingConformance`` can be asked of it: its answers are scripts or counted, so that it has neither seeds nor
    penalties nor biases, and it keeps nothing of a prompt.
    """

    @pytest.fixture
    def open_engine(self, engines):
        return _opener("fake", None, engines)

    def submit_telling(self, engine, prompt, max_tokens):
        return engine.submit(f"{prompt}\n{script(echo=True)}", max_tokens)

    def submit_failing(self, engine, prompt, max_tokens):
        return engine.submit(f"{prompt}\n{script(error_at=1)}", max_tokens)
