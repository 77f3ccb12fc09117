"""A step that fails costs the sequences in it, says so to each, and the engine goes on."""

from __future__ import annotations

import mlx.core as mx
import pytest

from slimproc.engines.mlx import sampling
from slimproc.engines.mlx.scoring import PromptReader
from slimproc.errors import InvalidRequest
from tests.engines.conformance import PROMPTS


class Trap:
    """A processor that raises at one of its calls."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, _tokens, logits):
        self.at -= 1
        if self.at == 0:
            raise RuntimeError("sprung\nand more")
        return logits


@pytest.fixture
def trap(monkeypatch):
    """``trap(n)``: from now on, biases raise at their n-th call."""
    return lambda at: monkeypatch.setattr(sampling, "Bias", lambda *_: Trap(at))


@pytest.mark.parametrize("at", [1, 5], ids=["as its prompt ends", "while it decodes"])
def test_an_exception_in_a_step_fails_all_its_sequences_and_the_engine_goes_on(open_mlx, random_model, trap, at):
    alone = open_mlx(random_model).complete(PROMPTS[0], 12).text
    engine = open_mlx(random_model)
    running = engine.submit(PROMPTS[0], 60)
    engine.until_generating(running)
    trap(at)
    trapped = engine.submit(PROMPTS[1], 60, logit_bias={5: 1.0})
    engine.finish()
    for generation in (running, trapped):
        assert generation.failure.endswith("RuntimeError: sprung")
    assert engine.complete(PROMPTS[0], 12).text == alone


def test_sequences_that_the_generator_loses_fail_and_do_not_hang(open_mlx, random_model, monkeypatch):
    engine = open_mlx(random_model)
    generations = [engine.submit(prompt, 30) for prompt in PROMPTS[:3]]
    engine.until_generating(generations[0])
    monkeypatch.setattr(engine.backend._generator, "next", lambda: ([], []))
    engine.finish()
    assert all("lost sequences" in generation.failure for generation in generations)
    assert engine.complete(PROMPTS[0], 5, ignore_eos=True).usage.completion_tokens == 5


def test_one_lost_sequence_is_noticed_as_well(open_mlx, random_model):
    engine = open_mlx(random_model)
    first, second = (engine.submit(prompt, 200, ignore_eos=True) for prompt in PROMPTS[:2])
    engine.until_generating(first)
    engine.until_generating(second)
    engine.backend._generator.remove([engine.backend._active[second.sequence.rid].uid])
    engine.step()
    assert first.failure
    assert second.failure


def test_a_failure_between_two_steps_comes_out_in_the_next(open_mlx, random_model, monkeypatch):
    def refuse(*_args, **_options):
        raise RuntimeError("[malloc] no memory")

    engine = open_mlx(random_model)
    gone, stays = (engine.submit(prompt, 200, ignore_eos=True) for prompt in PROMPTS[:2])
    engine.until_generating(stays)
    monkeypatch.setattr(engine.backend._generator, "remove", refuse)
    engine.cancel(gone)
    waiting = engine.submit(PROMPTS[2], 5, ignore_eos=True)
    engine.finish()
    assert "[malloc] no memory" in stays.failure
    assert waiting.usage.completion_tokens == 5, "who only waited has lost nothing"


def test_an_insert_that_fails_is_told_to_its_sequence(open_mlx, random_model, monkeypatch):
    def refuse(*_args, **_options):
        raise ValueError("no")

    engine = open_mlx(random_model)
    monkeypatch.setattr(engine.backend._generator, "insert", refuse)
    unlucky = engine.submit(PROMPTS[0], 5)
    engine.finish()
    assert unlucky.failure.endswith("ValueError: no")
    assert engine.complete(PROMPTS[0], 5, ignore_eos=True).usage.completion_tokens == 5


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5, "top_k": 9}], ids=str)
def test_a_model_of_nan_fails_the_sequence_and_not_the_engine(open_mlx, random_model, tmp_path, options):
    folder = tmp_path / "nan"
    folder.mkdir()
    for file in random_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = {name: array * mx.nan for name, array in mx.load(str(random_model / "model.safetensors")).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    engine = open_mlx(folder)
    for _ in range(2):
        assert "no token that can be chosen" in engine.complete(PROMPTS[0], 5, **options).failure
    assert len(engine.backend._prefixes) == 0, "nothing of it is kept"


def test_everything_barred_is_a_failure_of_that_sequence_alone(open_mlx, random_model):
    engine = open_mlx(random_model)
    barred = engine.submit(PROMPTS[0], 5, logit_bias=dict.fromkeys(range(engine.info.vocab_size), float("-inf")))
    other = engine.submit(PROMPTS[1], 5, ignore_eos=True)
    engine.finish()
    assert "no token that can be chosen" in barred.failure
    assert other.usage.completion_tokens == 5


def test_no_sampling_parameter_can_raise_inside_a_step(open_mlx, random_model):
    engine = open_mlx(random_model, slots=8)
    odd = [
        {"top_k": 10**6}, {"top_k": 260}, {"top_k": 259}, {"top_k": 1}, {"min_p": 1.0}, {"min_p": 1.5}, {"top_p": 1e-9},
        {"top_p": 0.0}, {"temperature": 1e-4}, {"temperature": 1e9}, {"repetition_penalty": 1e-3}, {"top_k": -1},
        {"frequency_penalty": -2.0, "presence_penalty": 2.0}, {"logit_bias": {0: 100.0, 259: -100.0}}, {"seed": 2**63},
        {"top_k": 5, "top_p": 0.1, "min_p": 0.5},
    ]  # fmt: skip
    for start in range(0, len(odd), 8):
        batch = [
            engine.submit(PROMPTS[2], 6, **{"temperature": 1.0, "ignore_eos": True, **options})
            for options in odd[start : start + 8]
        ]
        engine.finish()
        assert [generation.failure for generation in batch] == [None] * len(batch)
        assert [generation.usage.completion_tokens for generation in batch] == [6] * len(batch)


def test_what_is_refused_leaves_no_trace(open_mlx, random_model):
    engine = open_mlx(random_model)
    running = engine.submit(PROMPTS[0], 20, ignore_eos=True)
    for prompt, options in (([], {}), ([3, 260], {}), ([3], {"logit_bias": {260: 1.0}})):
        with pytest.raises(InvalidRequest):
            engine.submit(prompt, 4, **options)
    assert list(engine.backend._active) == [running.sequence.rid]
    engine.finish()
    assert running.usage.completion_tokens == 20


def test_a_prompt_whose_scoring_fails_costs_its_own_sequence_only(open_mlx, random_model, monkeypatch):
    alone = open_mlx(random_model).complete(PROMPTS[0], 20).text
    engine = open_mlx(random_model)
    running = engine.submit(PROMPTS[0], 20)
    engine.until_generating(running)
    with monkeypatch.context() as patched:
        patched.setattr(PromptReader, "read", lambda _reader: 1 / 0)
        unlucky = engine.submit(PROMPTS[2], 4, logprobs=1, echo=True)
        behind = engine.submit(PROMPTS[2], 4, logprobs=1, echo=True)
        engine.step()
    assert "ZeroDivisionError" in unlucky.failure
    engine.finish()
    assert running.text == alone
    assert behind.failure is None
    assert len(behind.logprobs) == behind.usage.prompt_tokens + 4


def test_a_broken_step_leaves_prompts_that_are_being_scored(open_mlx, random_model, monkeypatch):
    engine = open_mlx(random_model, context=512)
    running = engine.submit(PROMPTS[0], 20)
    engine.until_generating(running)
    scored = engine.submit(PROMPTS[2] * 3, 4, logprobs=1, echo=True)
    monkeypatch.setattr(engine.backend._generator, "next", lambda: 1 / 0)
    engine.step()
    assert running.failure
    assert scored.failure is None
    engine.finish()
    assert scored.failure is None
    assert len(scored.logprobs) == scored.usage.prompt_tokens + 4
