"""The MLX backend passes the suites that all backends share."""

from __future__ import annotations

import pytest

from tests.engines.grammar_conformance import GrammarConformance
from tests.engines.logprobs_conformance import ModelLogprobsConformance
from tests.engines.sampling_conformance import SamplingConformance


class TestMlx(ModelLogprobsConformance, SamplingConformance):
    evaluated_ahead = 1

    @pytest.fixture
    def open_engine(self, open_mlx, random_model):
        return lambda **options: open_mlx(random_model, **options)


class TestMlxWithGrammars(GrammarConformance):
    @pytest.fixture
    def open_engine(self, open_mlx, random_model):
        return lambda **options: open_mlx(random_model, **options)
