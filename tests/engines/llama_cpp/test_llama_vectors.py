"""Vectors and ranks of real files: against a reference of the same weights, and what a file says of its model."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from slimproc.engines.backend import create
from slimproc.engines.llama_cpp.model import BATCH
from slimproc.errors import InvalidRequest, LoadFailed
from tests.engines.embedding import EmbeddingEngine
from tests.minilm import CLS, SEP, reference_ids, reference_vector, tiny_bert, vocabulary, write_minilm
from tests.models import scripted, tiny_random

POOL = gguf.PoolingType
TEXTS = [
    "Hello world!",
    "The quick brown fox jumps over the lazy dog.",
    "Ünïcödé, don't & [SEP] stuff; 中文 12.5% of it",
    "unbelievable tokenization",
    "x",
    "What is the capital of France? " * 12,
]


@pytest.fixture(scope="session")
def minilm(tmp_path_factory):
    return write_minilm(tmp_path_factory.mktemp("minilm") / "minilm.gguf")


@pytest.fixture
def open_engine(settings):
    opened = []

    def make(path, **changes) -> EmbeddingEngine:
        opened.append(EmbeddingEngine(create(settings(path, **{"context": None, **changes}))))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


# --- MiniLM against numpy ---------------------------------------------------------------------------------------------


def test_minilm_tokenizes_as_bert_does_and_control_tokens_in_texts_are_text(open_engine, minilm):
    engine = open_engine(minilm)
    for text in TEXTS:
        assert engine.backend.tokenize_input(text, query=None) == reference_ids(text)


def test_minilms_vectors_are_those_of_its_weights(open_engine, minilm):
    engine = open_engine(minilm)
    assert (engine.info.context, engine.info.embedding_size, engine.info.capabilities) == (512, 384, ("embed",))
    wanted = np.stack([reference_vector(text) for text in TEXTS])
    vectors = engine.vectors(TEXTS)
    cosines = (vectors * wanted).sum(axis=1)
    assert cosines.min() >= 0.9999, cosines
    near, far = engine.vectors(["a cat sat on the mat", "a kitten on a rug", "quarterly revenue fell"])[0] @ (
        engine.vectors(["a kitten on a rug", "quarterly revenue fell"]).T
    )
    assert near > far + 0.2


def test_short_texts_share_a_call_and_a_call_has_no_more_tokens_than_a_batch(open_engine, minilm):
    engine = open_engine(minilm, slots=1)
    assert engine.info.slots >= 64
    texts = ["ten or so tokens are in this text, I think"] * 32
    tokens = sum(len(engine.backend.tokenize_input(text, query=None)) for text in texts)
    engine.vectors(texts)
    assert engine.steps == -(-tokens // (BATCH // 13 * 13))


# --- long texts -------------------------------------------------------------------------------------------------------


def test_a_text_longer_than_a_batch_is_read_whole_beside_short_ones(open_engine, tmp_path):
    engine = open_engine(tiny_bert(tmp_path / "bert.gguf", context=1024), context=1024)
    texts = ["a b", "a " * 598, "c d", "a " * 1022]
    vectors = engine.vectors(texts)
    assert np.stack([engine.vectors([text])[0] for text in texts]) == pytest.approx(vectors, abs=2e-3)
    assert abs(vectors[1] - vectors[3]).max() > 1e-3, "the end of a text counts, too"


def test_context_beyond_the_trained_positions_is_cut_to_them(open_engine, tmp_path):
    path = tiny_bert(tmp_path / "bert.gguf", context=600)
    assert open_engine(path, context=100_000).info.context == 600
    assert open_engine(path).info.context == 600
    assert open_engine(path, context=64).info.context == 64


@pytest.mark.parametrize(("slots", "context"), [(65, 64), (100, 512), (7, 1000), (256, 600)])
def test_no_number_of_slots_and_no_context_makes_llama_cpp_abort(open_engine, tmp_path, slots, context):
    engine = open_engine(tiny_bert(tmp_path / "bert.gguf", context=1024), slots=slots, context=context)
    vectors = engine.vectors(["a b", "c " * (context - 2), *["d"] * (engine.info.slots - 2)])
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)


# --- pooling ----------------------------------------------------------------------------------------------------------


def test_each_pooling_of_a_file_is_followed(open_engine, tmp_path):
    vectors = []
    for kind in (POOL.MEAN, POOL.CLS, POOL.LAST):
        engine = open_engine(tiny_bert(tmp_path / f"{kind}.gguf", pooling=kind))
        assert engine.info.capabilities == ("embed",)
        vectors.append(engine.vectors(["some text"])[0])
    mean, cls, last = vectors
    assert min(abs(mean - cls).max(), abs(cls - last).max(), abs(mean - last).max()) > 0.01


def test_the_setting_wins_over_the_file(open_engine, tmp_path):
    path = tiny_bert(tmp_path / "mean.gguf", pooling=POOL.MEAN)
    cls = open_engine(tiny_bert(tmp_path / "cls.gguf", pooling=POOL.CLS)).vectors(["some text"])
    assert open_engine(path, pooling="cls").vectors(["some text"]) == pytest.approx(cls, abs=1e-5)


def test_an_encoder_whose_file_names_no_pooling_must_be_told(open_engine, tmp_path):
    path = tiny_bert(tmp_path / "bert.gguf", pooling=None)
    with pytest.raises(LoadFailed, match="set pooling to mean, cls or last") as refusal:
        open_engine(path)
    assert refusal.value.permanent
    assert open_engine(path, pooling="mean").info.capabilities == ("embed",)


def test_a_model_that_generates_makes_vectors_only_where_that_is_set(open_engine, tmp_path):
    path = tiny_random(tmp_path / "tiny.gguf")
    assert open_engine(path, context=64).info.capabilities == ("generate",)
    engine = open_engine(path, context=64, pooling="mean")
    assert (engine.info.capabilities, engine.info.embedding_size) == (("embed",), 64)


def test_the_last_token_is_what_last_pools(open_engine, tmp_path):
    """A one-layer model whose hidden state is its token: the vector of a text is that of its last one."""
    engine = open_engine(scripted(tmp_path / "scripted.gguf"), context=64, pooling="last")
    abc, c, cba = engine.vectors(["abc", "c", "cba"])
    assert abc == pytest.approx(c, abs=1e-4)
    assert abs(abc - cba).max() > 0.5


def test_weights_that_are_no_numbers_fail_the_text_and_not_the_engine(open_engine, tmp_path):
    engine = open_engine(tiny_bert(tmp_path / "nan.gguf", nan=True))
    for _ in range(2):
        (failure,) = engine.finish(engine.begin("some text"))
        assert "NaN" in failure


def test_a_token_id_outside_the_vocabulary_never_reaches_the_model(open_engine, tmp_path):
    engine = open_engine(tiny_bert(tmp_path / "bert.gguf"))
    for token in (-1, engine.info.vocab_size, 10**9):
        with pytest.raises(InvalidRequest):
            engine.begin([5, token])


# --- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [1, 3])
def test_a_rank_is_one_number_whatever_the_head_has(open_engine, tmp_path, classes):
    engine = open_engine(tiny_bert(tmp_path / "rank.gguf", pooling=POOL.RANK, classes=classes))
    assert (engine.info.capabilities, engine.info.embedding_size) == (("rerank",), 0)
    ranks = engine.vectors(["a b c", "d e", "f"], query="a b")
    assert ranks.shape == (3, 1)
    assert len({float(rank) for rank in ranks[:, 0]}) == 3
    alone = np.concatenate([engine.vectors([text], query="a b") for text in ("a b c", "d e", "f")])
    assert ranks == pytest.approx(alone, abs=1e-3)
    if classes == 1:
        assert ((ranks > 0) & (ranks < 1)).all()


def test_a_rank_reads_the_query_too(open_engine, tmp_path):
    engine = open_engine(tiny_bert(tmp_path / "rank.gguf", pooling=POOL.RANK))
    assert abs(engine.vectors(["a b c"], query="a") - engine.vectors(["a b c"], query="z y x")).max() > 1e-4


def test_a_query_and_a_document_stand_between_berts_marks_and_cannot_write_them(open_engine, minilm):
    engine = open_engine(minilm)
    cls, sep = (vocabulary().index(word) for word in (CLS, SEP))
    query, document = (reference_ids(text)[1:-1] for text in ("what is it", f"a {SEP} thing"))
    assert engine.backend.tokenize_input(f"a {SEP} thing", query="what is it") == [cls, *query, sep, *document, sep]


def test_a_setting_for_vectors_is_refused_by_a_model_that_ranks(open_engine, tmp_path):
    with pytest.raises(LoadFailed, match="ranks documents"):
        open_engine(tiny_bert(tmp_path / "rank.gguf", pooling=POOL.RANK), pooling="mean")


def test_a_model_that_makes_vectors_guesses_nothing_and_says_so(open_engine, minilm, capfd):
    assert open_engine(minilm, speculation=4).info.details["speculation"] == 0
    assert "speculation is of no use to this model" in capfd.readouterr().err
