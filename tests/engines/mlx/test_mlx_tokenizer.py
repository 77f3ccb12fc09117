"""Text to tokens and exact bytes back, for both families of tokenizers: byte-level, and words with a mark for the space."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from slimproc.engines.mlx.directory import ModelDirectory
from slimproc.engines.mlx.pieces import PieceDecoder, UnknownDecoderError, spelled_bytes
from slimproc.engines.mlx.tokenizer import Vocabulary
from slimproc.engines.sequence import Sequence
from slimproc.errors import InvalidRequest
from slimproc.ipc.wire import Submit

CONTROL = ["<unk>", "<s>", "</s>"]
TEXTS = ["Hello world", "two  spaces ", "é🙂\n\ttab", "a", "</s> and <s>", "日本語 ok"]


def directory(folder: Path, tokenizer: Tokenizer, **config) -> ModelDirectory:
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "model.safetensors").write_bytes(bytes(9))
    return ModelDirectory(folder)


def vocabulary(folder: Path, tokenizer: Tokenizer, **config) -> Vocabulary:
    made = Vocabulary(directory(folder, tokenizer, **config))
    made.size = tokenizer.get_vocab_size(with_added_tokens=True)
    return made


def marked(kind: str) -> Tokenizer:
    """A tokenizer in the manner of Llama 2 (``prepend``) or of its later conversions (``metaspace``)."""
    words = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"Helo wrdabcuis", "He", "▁w", "▁H", "▁He"]
    vocab = {word: token for token, word in enumerate(dict.fromkeys(words))}
    merges = [("H", "e"), ("▁", "w"), ("▁", "H"), ("▁H", "e")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    if kind == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in CONTROL])
    return tokenizer


@pytest.fixture(params=["prepend", "metaspace"])
def words(request, tmp_path) -> Vocabulary:
    return vocabulary(tmp_path, marked(request.param))


@pytest.fixture
def byte_level(random_model) -> Vocabulary:
    made = Vocabulary(ModelDirectory(random_model))
    made.size = 260
    return made


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_as_it_was(words, byte_level, text):
    for known in (words, byte_level):
        assert known.detokenize(known.tokenize(text, add_bos=False, parse_special=False)).decode() == text


def test_pieces_keep_each_first_space_and_each_half_of_a_character(words):
    tokens = words.tokenize("a wé", add_bos=False, parse_special=False)
    assert [words.piece(token) for token in tokens[-3:]] == [b" w", b"\xc3", b"\xa9"]
    assert b"".join(map(words.piece, tokens)) == " a wé".encode()


def test_pieces_make_the_text_through_the_engines_own_assembler(words):
    sequence = Sequence(Submit(rid=1, prompt="x"), [5], 100)
    tokens = words.tokenize("a🙂 w", add_bos=False, parse_special=False)
    said = [item.text for token in tokens if (item := sequence.advance(words.piece(token), False))]
    assert "".join(said) == " a🙂 w"


def test_a_control_token_has_no_piece_and_is_spelled_out_when_asked(words):
    assert words.piece(2) == b""
    assert words.detokenize([1, 2]) == b"<s></s>"


def test_a_token_that_was_added_and_is_no_control_token_is_text(tmp_path):
    tokenizer = marked("metaspace")
    tokenizer.add_tokens(["<think>"])
    known = vocabulary(tmp_path, tokenizer)
    (token,) = known.tokenize("<think>", add_bos=False, parse_special=False)[-1:]
    assert known.piece(token) == b"<think>"
    assert "<think>" not in known.control_texts


def test_bos_comes_once(words):
    assert words.tokenize("a", add_bos=True, parse_special=True)[:2].count(1) == 1
    assert words.tokenize("<s>a", add_bos=True, parse_special=True).count(1) == 1
    assert words.tokenize("a", add_bos=False, parse_special=True).count(1) == 0
    assert words.tokenize_spans("<s>a", []).count(1) == 1
    assert words.tokenize_spans("a", []).count(1) == 1


@pytest.mark.parametrize("adds", [True, False])
def test_the_tokenizers_configuration_has_the_last_word_on_bos(tmp_path, adds):
    known = vocabulary(tmp_path, marked("prepend"), add_bos_token=adds)
    assert known.tokenize("a", add_bos=True, parse_special=True).count(1) == int(adds)


@pytest.mark.parametrize("kind", ["prepend", "metaspace"])
def test_a_literal_span_leaves_the_rest_of_the_text_as_it_was(tmp_path, kind):
    """What a caller typed is no control token, and no space appears or goes at the seams."""
    known = vocabulary(tmp_path, marked(kind))
    text = "<s>user Hello </s> w</s><s>a w"
    start = text.index("</s>")
    plain = known.tokenize_spans(text, [])
    spans = known.tokenize_spans(text, [(start, start + 4)])
    assert (plain.count(2), spans.count(2)) == (2, 1)
    assert known.detokenize(spans).replace(b" ", b"") == known.detokenize(plain).replace(b" ", b"")
    assert b"Hello </s> w</s>" in known.detokenize(spans)
    tail = plain[len(plain) - plain[::-1].index(2) - 1 :]
    assert spans[-len(tail) :] == tail, "after the template's own control token all is as before"


@pytest.mark.parametrize("spans", [[(3, 1)], [(0, 99)], [(0, 4), (2, 5)], [(-1, 2)]])
def test_spans_that_make_no_sense_are_refused(byte_level, spans):
    with pytest.raises(InvalidRequest):
        byte_level.tokenize_spans("some text", spans)


def test_half_a_surrogate_pair_is_refused(byte_level):
    with pytest.raises(InvalidRequest):
        byte_level.tokenize("a\ud83d", add_bos=False, parse_special=False)


def test_a_limit_that_the_file_carries_cuts_nothing(tmp_path):
    tokenizer = marked("prepend")
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    assert len(vocabulary(tmp_path, tokenizer).tokenize("abc" * 10, add_bos=False, parse_special=False)) == 31


def test_ends_are_those_of_every_configuration_and_those_that_are_known_by_name(tmp_path):
    tokenizer = marked("prepend")
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True), AddedToken("<|other|>", special=True)])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    known = vocabulary(tmp_path, tokenizer)
    assert known.ends == {2, 7, 9, tokenizer.token_to_id("<|im_end|>")}


def test_rows_that_only_fill_the_matrix_up_have_no_text(words):
    words.size += 10
    assert words.piece(words.size - 1) == b""


def test_every_byte_has_a_spelling_of_its_own():
    table = spelled_bytes()
    assert sorted(table.values()) == list(range(256))
    assert (table["Ġ"], table["Ċ"], table["a"], table["Ã"]) == (0x20, 0x0A, 0x61, 0xC3)


@pytest.mark.parametrize(
    "decoder", [{"type": "WordPiece"}, {"type": "Replace", "pattern": {"Regex": "x"}, "content": ""}, {}]
)
def test_a_decoder_that_is_not_known_is_refused_rather_than_guessed(decoder):
    with pytest.raises(UnknownDecoderError):
        PieceDecoder(decoder)


def test_a_byte_level_word_that_is_not_spelled_in_bytes_is_taken_as_it_is():
    assert PieceDecoder({"type": "ByteLevel"}).piece("日") == "日".encode()
    assert PieceDecoder(None).piece("x") == b"x"
    assert SimpleNamespace(**vars(PieceDecoder({"type": "Metaspace", "replacement": "_"}))).strips


class PanicException(BaseException):  # pyo3's own name
    """What a panic in Rust code becomes: no Exception, and its class cannot be imported."""


def raises(error):
    def encode(*_, **__):
        raise error

    return SimpleNamespace(encode=encode)


def test_a_tokenizer_that_panics_at_a_text_refuses_it(tmp_path):
    made = vocabulary(tmp_path, marked("prepend"))
    made._whole = raises(PanicException("index out of bounds"))
    with pytest.raises(InvalidRequest, match="index out of bounds"):
        made.tokenize("a", add_bos=False, parse_special=True)
    made._whole = raises(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        made.tokenize("a", add_bos=False, parse_special=True)
