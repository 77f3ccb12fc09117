"""The MLX backend passes the suite that all backends share."""

from __future__ import annotations

import pytest

from tests.engines.conformance import SamplingConformance


class TestMlx(SamplingConformance):
    evaluated_ahead = 1

    @pytest.fixture
    def open_engine(self, open_mlx, random_model):
        return lambda **options: open_mlx(random_model, **options)
