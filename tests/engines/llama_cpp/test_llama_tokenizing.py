"""Texts on which llama.cpp ends the process, or at which it would work for long: they are told apart before."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from itertools import accumulate
from pathlib import Path

import pytest

from slimproc.engines.acceptance import Acceptance
from slimproc.engines.backend import create
from slimproc.engines.llama_cpp.tokenizing import _ROW
from slimproc.errors import ContextLengthExceeded, InvalidRequest
from slimproc.ipc import wire
from tests.engines.embedding import EmbeddingEngine
from tests.engines.llama_cpp.kinds import SPM_WORDS, by_threes, byte_level, sentencepiece
from tests.minilm import tiny_bert

ROOT = str(Path(__file__).parents[3])
CHILD = textwrap.dedent("""
    import sys
    from slimproc.engines.backend import create
    from slimproc.settings import EngineSettings
    backend = create(EngineSettings(model="m", backend="llama_cpp", path=sys.argv[1], slots=1, context=64))
    backend.load(lambda _fraction: None)
    for text in eval(sys.argv[2]):
        print(len(backend.tokenize(text, add_special=True, parse_special=True)))
""")


def lengths(model: Path, *texts: str) -> list[str]:
    """How many tokens each of ``texts`` has, Python expressions, by a process of its own: it might end or never come back."""
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(model), f"[{', '.join(texts)}]"],
        capture_output=True, text=True, timeout=120, check=False, env={"PYTHONPATH": ROOT, "GGML_NO_BACKTRACE": "1"},
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    return child.stdout.split()


@pytest.fixture
def regex_model(models, tmp_path):
    """Its vocabulary cuts texts into words by a regular expression that llama.cpp leaves to the standard library."""
    path = tmp_path / "regex.gguf"
    path.write_bytes((models / "tiny.gguf").read_bytes().replace(b"gpt-2", b"bloom", 1))
    return path


def test_a_word_of_any_length_does_not_overflow_the_stack(regex_model):
    """It ended by SIGSEGV."""
    assert lengths(regex_model, "'a' * 400_000", "'.' * 400_000", "'\u4e2d' * 100_000") == [
        "400000",
        "400000",
        "300000",
    ]


def test_a_long_text_has_the_tokens_of_its_parts(open_engine, regex_model):
    backend = open_engine(regex_model).backend
    tokens = backend.tokenize("some words, " * 1000, add_special=False, parse_special=False)
    assert tokens == backend.tokenize("some words, ", add_special=False, parse_special=False) * 1000


def test_half_a_surrogate_pair_in_a_long_text_is_the_callers_fault(open_engine):
    with pytest.raises(InvalidRequest):
        open_engine().backend.tokenize("a" * 100_000 + "\ud800", add_special=True, parse_special=True)


# --- kinds with a fault of their own ----------------------------------------------------------------------------------


def test_digits_that_are_grouped_from_the_right_take_no_time_that_grows_with_the_square_of_their_number(tmp_path):
    """400,000 took an hour."""
    assert lengths(by_threes(tmp_path / "m.gguf"), "'7' * 400_000") == ["133334"]


def test_a_long_row_of_digits_is_grouped_as_a_short_one(open_engine, tmp_path):
    vocabulary = open_engine(by_threes(tmp_path / "m.gguf")).backend._vocabulary
    tokenizer = vocabulary._tokenizer
    digits = "31415926535897932384626433832795028841971693993751" * 20
    for count in (1, 2, 3, 4, _ROW - 1, _ROW, _ROW + 1, _ROW + 2, 2 * _ROW, 2 * _ROW + 1, 3 * _ROW - 1, len(digits)):
        for text in (
            digits[:count],
            f"a{digits[:count]}b",
            f"²{digits[:count]}², {digits[:count]}é",
            f"<|im_end|>{digits[:count]}",
        ):
            whole = tokenizer._with_room(text, parse_special=True, add_special=False)
            assert tokenizer.tokens(text, parse_special=True) == whole
    pieces = map(vocabulary.piece, vocabulary.tokenize(digits, add_bos=False, parse_special=False))
    ends = set(accumulate(map(len, pieces)))
    assert ends >= set(range(len(digits) % 3 or 3, len(digits) + 1, 3)), "no token reaches into the next group"


def test_more_than_one_blank_between_words_does_not_end_the_process(tmp_path):
    """Of a vocabulary that takes none of them for text."""
    model = byte_level(tmp_path / "m.gguf", "whitespace")
    texts = ("'a b'", "'  a   b  '", "'a \\n \\t b'", "'a \u3000 b'", "'\u2003 '", "' ' * 100_000")
    assert lengths(model, *texts) == ["2", "2", "2", "2", "0", "0"]


# --- what cannot be spelled -------------------------------------------------------------------------------------------


def test_what_a_vocabulary_without_bytes_cannot_spell_is_refused_by_its_name(open_engine, tmp_path):
    backend = open_engine(sentencepiece(tmp_path / "spm.gguf", byte_tokens=range(10, 11))).backend
    for text, culprit in (("hi é", "é"), ("hi Z", "Z"), ("hi\t", r"\\t"), ("🙂", "🙂")):
        with pytest.raises(InvalidRequest, match=culprit):
            backend.tokenize(text, add_special=True, parse_special=True)
        with pytest.raises(InvalidRequest, match=culprit):
            backend.tokenize_continuation(text)
    for text in ("hi\n now", "<|im_end|>hi"):
        tokens = backend.tokenize(text, add_special=True, parse_special=True)
        assert backend.detokenize(tokens[1:]).decode().replace(" ", "") == text.replace(" ", "")


def test_a_vocabulary_that_cannot_spell_a_blank_is_loaded_and_refuses_every_text(open_engine, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.engines.llama_cpp.kinds.SPM_WORDS", [word for word in SPM_WORDS if "▁" not in word])
    backend = open_engine(sentencepiece(tmp_path / "spm.gguf", byte_tokens=range(0))).backend
    with pytest.raises(InvalidRequest, match="spell"):
        backend.tokenize("hi", add_special=True, parse_special=True)


# --- what is far too long ---------------------------------------------------------------------------------------------


def submit(prompt: str, **changes) -> wire.Submit:
    return wire.Submit(rid=1, prompt=prompt, max_tokens=1, **changes)


def test_what_cannot_fit_is_refused_without_being_tokenized(open_engine, settings, monkeypatch):
    engine = open_engine()
    acceptance = Acceptance(engine.backend, engine.info)
    monkeypatch.setattr("slimproc.engines.llama_cpp.tokenizing.lib.llama_tokenize", None)
    huge = "word " * 200_000
    for command, param in ((submit(huge), "prompt"), (submit(huge, chat=True), "messages")):
        with pytest.raises(ContextLengthExceeded, match="context is 256 tokens") as refusal:
            acceptance.sequence(command)
        assert refusal.value.param == param
    with pytest.raises(ContextLengthExceeded):
        acceptance.pooled(wire.Embed(rid=1, prompt="a", name="input", query=huge))
    answer = acceptance.answer(wire.Tokenize(7, huge, add_special=True, parse_special=True))
    assert isinstance(answer, wire.QuestionRefused)
    assert (answer.question, answer.param) == (7, "content")


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_a_text_has_no_fewer_tokens_than_are_said(open_engine, tmp_path, kind):
    engine = open_engine(*([sentencepiece(tmp_path / "spm.gguf")] if kind == "sentencepiece" else []))
    for text in ("hi now " * 100, " t" * 500, "\n\n" * 300, "é🙂" * 50, "<|im_start|>" * 40):
        least = engine.backend.least_tokens(text)
        assert 0 < least <= len(engine.tokens(text))
    assert engine.backend.least_tokens("") == 0


def test_nothing_is_said_of_a_vocabulary_that_leaves_bytes_out(open_engine, models, tmp_path):
    """Byte-level ones do so with bytes that have no token of their own: a long text of those may be short."""
    path = tmp_path / "model.gguf"
    data = bytearray((models / "tiny.gguf").read_bytes())
    at = data.index(b"\x02\0\0\0\0\0\0\0" + "Č".encode()) + 8
    data[at : at + 2] = "Ж".encode()  # a character that stands for no byte
    path.write_bytes(data)
    engine = open_engine(path)
    assert engine.tokens("\f" * 50_000) == []
    assert engine.backend.least_tokens("\f" * 50_000) == 0


def test_nothing_is_said_of_a_vocabulary_of_words(settings, tmp_path):
    engine = EmbeddingEngine(create(settings(tiny_bert(tmp_path / "bert.gguf"), context=None)))
    assert engine.backend.least_tokens("x" * 50_000) == 0
    engine.close()
