"""A prompt whose values are NaN fails by itself: what it leaves in KV cells and states harms nobody after it or beside it."""

from __future__ import annotations

import numpy as np
import pytest

from slimproc.engines.backend import create
from slimproc.request import Finish
from tests.broken_models import with_a_token_of_nan
from tests.engines.embedding import EmbeddingEngine
from tests.engines.llama_cpp.kinds import recurrent
from tests.minilm import tiny_bert

BAD = "~"
SPOILED = "a" * 90 + BAD + "a" * 37
HEALTHY = "b" * 110


def byte(text: str) -> int:
    return 3 + ord(text)


@pytest.fixture(params=["attention", "recurrent"])
def kind(request):
    return request.param


@pytest.fixture
def path(tmp_path, models, kind):
    good = models / "tiny.gguf" if kind == "attention" else recurrent(tmp_path / "good.gguf")
    return with_a_token_of_nan(tmp_path / "nan.gguf", good, byte(BAD), 0)


@pytest.fixture
def open_here(open_engine, path):
    return lambda slots, **changes: open_engine(path, slots=slots, **changes)


@pytest.mark.parametrize("flash_attention", [True, False])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_whoever_comes_after_a_prompt_of_nan_says_what_it_says_alone(open_here, slots, flash_attention):
    alone = open_here(1).complete(HEALTHY, 8)
    assert alone.failure is None
    engine = open_here(slots, flash_attention=flash_attention)
    spoiled = [engine.submit(SPOILED, 8) for _ in range(slots)]
    engine.finish()
    assert all("NaN" in one.failure for one in spoiled)
    after = [engine.submit(HEALTHY, 8) for _ in range(slots)]
    engine.finish()
    assert [(one.failure, one.text) for one in after] == [(None, alone.text)] * slots
    assert "NaN" in engine.complete(SPOILED, 8).failure, "and its own text is no better the second time"


@pytest.mark.parametrize("flash_attention", [True, False])
def test_a_prompt_of_nan_harms_nobody_who_runs_beside_it_or_comes_while_others_run(open_here, flash_attention):
    engine = open_here(1)
    alone = {prompt: engine.complete(prompt, length).text for prompt, length in ((HEALTHY, 8), ("c" * 20, 100))}
    engine = open_here(3, flash_attention=flash_attention)
    beside = engine.submit("c" * 20, 100)
    engine.until_generating(beside)
    for _ in range(2):
        spoiled = [engine.submit(SPOILED, 8) for _ in range(2)]
        engine.finish(*spoiled)
        after = [engine.submit(HEALTHY, 8) for _ in range(2)]
        engine.finish(*after)
        assert [(one.failure, one.text) for one in after] == [(None, alone[HEALTHY])] * 2
    engine.finish()
    assert beside.text == alone["c" * 20]


def test_what_is_cancelled_in_the_middle_of_a_prompt_of_nan_harms_nobody(open_here, monkeypatch):
    engine = open_here(1)
    alone = engine.complete(HEALTHY, 8).text
    monkeypatch.setattr(engine.backend._budget, "tokens", lambda _running, _prompts: 100)
    gone = engine.submit(BAD + SPOILED[:50] + "a" * 100, 8)
    engine.step()
    if not gone.ended:
        engine.cancel(gone)
    assert engine.complete(HEALTHY, 8).text == alone


def test_a_prompt_of_nan_is_given_up_at_its_first_part(open_here, monkeypatch):
    engine = open_here(1)
    monkeypatch.setattr(engine.backend._budget, "tokens", lambda _running, _prompts: 20)
    spoiled = engine.submit(BAD + "a" * 200, 8)
    engine.step()
    assert "NaN" in spoiled.failure


def test_the_sound_part_of_a_cancelled_prompt_is_kept(open_engine, models, monkeypatch):
    engine = open_engine(slots=1)
    monkeypatch.setattr(engine.backend._budget, "tokens", lambda _running, _prompts: 100)
    gone = engine.submit(HEALTHY + "tail" * 10, 8)
    engine.step()
    engine.cancel(gone)
    assert engine.submit(HEALTHY + "other", 8).sequence.cached_tokens == 100


def test_a_prompt_does_not_copy_cells_of_nan_that_come_after_what_they_share(
    open_engine, models, tmp_path, monkeypatch
):
    """The other one fails in its next step, but at that moment it still runs."""
    path = with_a_token_of_nan(tmp_path / "nan.gguf", models / "tiny.gguf", byte(BAD))
    alone = open_engine(path).complete(HEALTHY, 8).text
    engine = open_engine(path, slots=2, flash_attention=False)
    monkeypatch.setattr(engine.backend._budget, "tokens", lambda _running, _prompts: 120)
    spoiled = engine.submit(HEALTHY[:100] + BAD + "a" * 100, 8)
    for _ in range(1):
        engine.backend.step()  # and what it says is not heard yet
    after = engine.submit(HEALTHY, 8)
    assert after.sequence.cached_tokens == 0
    engine.finish()
    assert "NaN" in spoiled.failure
    assert after.text == alone


def test_a_filler_is_a_token_whose_values_are_numbers(open_engine, tmp_path, models):
    path = with_a_token_of_nan(tmp_path / "nan.gguf", models / "tiny.gguf", 0)
    alone = open_engine(path).complete(HEALTHY, 8).text
    engine = open_engine(path, slots=3, flash_attention=False)
    first, middle, last = (engine.submit(text, 100) for text in "xyz")
    for one in (first, middle, last):
        engine.until_generating(one)
    engine.cancel(middle)
    for _ in range(5):
        engine.step()
    assert engine.complete(HEALTHY, 8).text == alone


def test_on_a_recurrent_model_nobody_who_waits_for_clean_states_is_passed_or_forgotten(open_engine, tmp_path):
    good = recurrent(tmp_path / "good.gguf")
    engine = open_engine(with_a_token_of_nan(tmp_path / "nan.gguf", good, byte(BAD)), slots=4)
    running = engine.submit("c" * 20, 60)
    engine.until_generating(running)
    engine.complete(SPOILED, 8)
    first, gone, second = (engine.submit(HEALTHY, 8) for _ in range(3))
    engine.step()
    assert first.sequence.generated == second.sequence.generated == 0
    engine.cancel(gone)
    assert gone.finish is Finish.CANCELLED
    engine.finish()
    assert [one.usage.completion_tokens for one in (running, first, second)] == [60, 8, 8]
    assert first.text == second.text


def test_a_refused_batch_leaves_cells_that_nobody_relies_on(open_engine, monkeypatch):
    engine = open_engine(slots=1)
    engine.complete(HEALTHY, 8)
    monkeypatch.setattr(engine.backend._batch, "decode", lambda _context: 1)
    assert "1" in engine.complete(HEALTHY + "c", 8).failure
    monkeypatch.undo()
    again = engine.submit(HEALTHY, 8)
    engine.finish()
    assert (again.failure, again.usage.cached_tokens) == (None, 0)


# --- scores of a prompt that is evaluated again -----------------------------------------------------------------------


def test_a_refused_batch_does_not_change_the_scores_of_a_prompt_that_a_recurrent_model_reads(
    open_engine, tmp_path, monkeypatch
):
    path = recurrent(tmp_path / "good.gguf")
    alone = open_engine(path).complete(HEALTHY, 4, logprobs=1, echo=True)
    engine = open_engine(path)
    scored = engine.submit(HEALTHY, 4, logprobs=1, echo=True)
    for _ in range(2):
        engine.step()
    newest = engine.submit("x" * 10, 4)
    decode = engine.backend._batch.decode

    def refuse_once(context):
        decode(context)
        monkeypatch.setattr(engine.backend._batch, "decode", decode)
        return 2

    monkeypatch.setattr(engine.backend._batch, "decode", refuse_once)
    engine.finish()
    assert "2" in newest.failure
    assert scored.text == alone.text
    assert [one.piece for one in scored.logprobs] == [one.piece for one in alone.logprobs]
    assert [one.logprob for one in scored.logprobs[1:]] == pytest.approx([one.logprob for one in alone.logprobs[1:]])


# --- vectors ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def embedding_engine(settings):
    opened = []

    def make(path, **changes):
        opened.append(EmbeddingEngine(create(settings(path, **changes))))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


@pytest.mark.parametrize("flash_attention", [True, False])
@pytest.mark.parametrize("model", ["decoder", "encoder"])
def test_a_text_of_nan_fails_alone_also_among_others_in_one_call(
    embedding_engine, tmp_path, models, flash_attention, model
):
    good = models / "tiny.gguf" if model == "decoder" else tiny_bert(tmp_path / "bert.gguf")
    bad = byte(BAD) if model == "decoder" else 7
    path = with_a_token_of_nan(tmp_path / "nan.gguf", good, bad)
    pooling = "mean" if model == "decoder" else None
    engine = embedding_engine(path, flash_attention=flash_attention, pooling=pooling)
    texts = [[8] * 20, [9] * 12, [10] * 5]
    alone = [engine.vectors([text])[0] for text in texts]
    begun = [engine.begin(text) for text in (texts[0], [8, bad, 9] * 10, *texts[1:])]
    first, failure, *others = engine.finish(*begun)
    assert "NaN" in failure
    for one, wanted in zip([first, *others], alone, strict=True):
        assert isinstance(one, np.ndarray)
        np.testing.assert_allclose(one, wanted, atol=1e-5)
    np.testing.assert_allclose(engine.vectors([texts[1]])[0], alone[1], atol=1e-5)
