"""Every backend that makes vectors keeps the same promises: one suite, as for generations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from slimproc.engines.backend import create
from slimproc.engines.pooled import PooledSequence, frames
from slimproc.ipc import wire
from slimproc.request import Finish, Usage
from slimproc.settings import EngineSettings
from slimproc.stream import VectorStream
from tests.engines.embedding import EmbeddingEngine
from tests.minilm import tiny_bert
from tests.models import tiny_random

TEXTS = ["one text", "x", "another one that is longer than the first", "one", "ab " * 60]


class EmbeddingConformance:
    """A subclass gives the fixture ``engine``."""

    def test_vectors_have_the_size_that_the_model_says_and_the_length_of_one(self, engine):
        vectors = engine.vectors(TEXTS)
        assert vectors.shape == (len(TEXTS), engine.info.embedding_size)
        assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)

    def test_a_vector_is_the_same_whatever_shares_the_call_and_in_any_order(self, engine):
        together = engine.vectors(TEXTS)
        alone = np.concatenate([engine.vectors([text]) for text in TEXTS])
        backwards = engine.vectors(TEXTS[::-1])[::-1]
        assert together == pytest.approx(alone, abs=2e-3)
        assert together == pytest.approx(backwards, abs=2e-3)
        assert abs(together @ together.T - np.eye(len(TEXTS))).max() > 0

    def test_texts_that_differ_have_vectors_that_differ(self, engine):
        vectors = engine.vectors(["one text", "some other text"])
        assert abs(vectors[0] - vectors[1]).max() > 0.01

    def test_dimensions_keeps_the_first_values_and_the_length_of_one(self, engine):
        (whole,), (cut,) = engine.vectors(["text"]), engine.vectors(["text"], dimensions=3)
        assert cut == pytest.approx(whole[:3] / np.linalg.norm(whole[:3]), abs=1e-4)

    def test_token_ids_are_read_as_they_are(self, engine):
        sequence = engine.begin("some text")
        (by_text,) = engine.finish(sequence)
        assert engine.vectors([sequence.prompt])[0] == pytest.approx(by_text, abs=1e-4)

    def test_a_text_that_fills_the_context_is_read_whole(self, engine):
        letter = engine.begin("x").prompt[-2:][0]
        full = [letter] * engine.info.context
        vectors = engine.vectors([full, full[:-1], "x"])
        assert np.isfinite(vectors).all()

    def test_removing_a_text_leaves_the_others_alone(self, engine):
        alone = engine.vectors(TEXTS[:3])
        first, gone, last = (engine.begin(text) for text in TEXTS[:3])
        engine.backend.remove(gone)
        engine.backend.remove(gone)
        assert np.stack(engine.finish(first, last)) == pytest.approx(alone[[0, 2]], abs=2e-3)

    def test_more_texts_than_one_call_takes_are_all_read(self, engine):
        texts = [f"text {number}" for number in range(engine.info.slots)]
        assert len(engine.vectors(texts)) == len(texts)


@pytest.fixture
def open_engine():
    opened = []

    def make(backend: str, path=None, **changes) -> EmbeddingEngine:
        settings = {"slots": 4, "threads": 1, "context": 256, "path": path and str(path), **changes}
        opened.append(EmbeddingEngine(create(EngineSettings(model="m", backend=backend, **settings))))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


class TestFake(EmbeddingConformance):
    @pytest.fixture
    def engine(self, open_engine):
        return open_engine("fake")


class TestLlamaCpp(EmbeddingConformance):
    @pytest.fixture
    def engine(self, open_engine, tmp_path):
        return open_engine("llama_cpp", tiny_bert(tmp_path / "bert.gguf"))


class TestLlamaCppWithModelsThatCouldGenerate(EmbeddingConformance):
    @pytest.fixture(params=["mean", "last"])
    def engine(self, open_engine, tmp_path, request):
        return open_engine("llama_cpp", tiny_random(tmp_path / "tiny.gguf", bos=True), pooling=request.param)


@pytest.mark.parametrize("values", [1, 8, 384, 4096, 20_000])
def test_a_vector_goes_out_in_frames_that_are_never_too_long_and_comes_back_whole(values):
    largest = 1024
    sequence = PooledSequence(wire.Embed(rid=2**53, prompt="x", name="input"), [1, 2, 3], 10)
    vector = np.arange(values, dtype="<f4").tobytes()
    stream = VectorStream(3)
    ends = []
    stream.on_end = lambda one: ends.append(one.index)
    parts = list(frames(sequence, vector, largest))
    for part, last in zip(parts, itertools.chain([False] * (len(parts) - 1), [True]), strict=True):
        payload = wire.encode(part)
        assert len(payload) <= largest
        event = wire.decode_event(payload)
        assert (event.rid, event.usage is not None) == (2**53, last)
        assert not ends
        stream.take_vector(event.vector, event.usage, 5)
    assert bytes(stream.vector) == vector
    assert len(parts) == math.ceil(len(vector) / (largest - 128))
    assert ends == [3]
    assert (stream.finish, stream.usage) == (Finish.STOP, Usage(3))


def test_a_vector_that_had_begun_to_come_starts_anew_on_the_next_engine():
    stream = VectorStream()
    stream.take_vector(b"half", None, 1)
    stream.reset()
    stream.take_vector(b"all of it", Usage(1), 2)
    assert bytes(stream.vector) == b"all of it"
