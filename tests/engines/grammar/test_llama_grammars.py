"""The llama.cpp backend follows grammars."""

from __future__ import annotations

import pytest

from slimproc.engines.backend import create
from slimproc.settings import EngineSettings
from tests.engines.driver import Engine
from tests.engines.grammar_conformance import GrammarConformance
from tests.models import tiny_random


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return tiny_random(tmp_path_factory.mktemp("models") / "tiny.gguf")


class TestLlamaCpp(GrammarConformance):
    speculation = 0

    @pytest.fixture
    def open_engine(self, tiny_model):
        opened: list[Engine] = []

        def make() -> Engine:
            settings = EngineSettings(
                model="tiny",
                backend="llama_cpp",
                path=str(tiny_model),
                slots=4,
                context=256,
                threads=1,
                speculation=self.speculation,
            )
            opened.append(Engine(create(settings)))
            return opened[-1]

        yield make
        for engine in opened:
            engine.close()


class TestLlamaCppGuessingAhead(TestLlamaCpp):
    """A grammar allows a guess only where it has been followed so far."""

    speculation = 3

    @pytest.fixture(autouse=True)
    def guesses_everywhere(self, monkeypatch):
        monkeypatch.setattr("slimproc.engines.llama_cpp.lookup.GRAM", 1)
