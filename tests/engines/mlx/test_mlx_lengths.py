"""How few tokens a text can have: never more than it has, and nothing where that is not sure."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from slimproc.engines.acceptance import Acceptance
from slimproc.engines.mlx.lengths import _NFC, LeastTokens
from slimproc.errors import ContextLengthExceeded
from slimproc.ipc import wire
from tests.engines.mlx.test_mlx_tokenizer import marked

BYTES = [*pre_tokenizers.ByteLevel.alphabet()]
HANGUL = "\u1112\u1161\u11ab"
GREEK = "\u1fbe\u0308\u0301"


def byte_level(normalizer=None, *, words=("he", "hel", "ĠĠ"), lacks="", **model) -> Tokenizer:
    vocabulary = [letter for letter in sorted(BYTES) if letter not in lacks] + list(words)
    merges = [("h", "e"), ("he", "l"), ("Ġ", "Ġ")] if not lacks else []
    tokenizer = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(vocabulary)}, merges=merges, **model))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex(r"\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def greedy_blanks() -> Tokenizer:
    """A token that takes all blanks around it along."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<m>", lstrip=True, rstrip=True)])
    return tokenizer


def least(tokenizer: Tokenizer) -> LeastTokens:
    return LeastTokens(json.loads(tokenizer.to_str()))


KNOWN = {
    "bytes": byte_level(),
    "bytes behind NFC": byte_level(normalizers.NFC()),
    "with a token that takes blanks along": greedy_blanks(),
    "a mark put in front": marked("prepend"),
    "a mark for blanks": marked("metaspace"),
}
PARTS = [
    "hel",
    " ",
    "  ",
    "\n",
    "1",
    "a",
    "é",
    "🙂",
    "<m>",
    "▁",
    "\u00a0",
    "\u2003",
    HANGUL,
    GREEK,
    "\u1fef",
    "</s>",
    "日",
]


@pytest.mark.parametrize("kind", KNOWN)
@given(text=st.lists(st.sampled_from(PARTS) | st.text(st.characters(codec="utf-8")), max_size=40).map("".join))
def test_a_text_has_no_fewer_tokens_than_are_said(kind, text):
    assert least(KNOWN[kind]).of(text) <= len(KNOWN[kind].encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("part", PARTS)
def test_that_holds_for_long_rows_and_something_is_said_of_them(kind, part):
    text = part * 400
    said = least(KNOWN[kind]).of(text)
    assert said <= len(KNOWN[kind].encode(text, add_special_tokens=False).ids)
    assert said or not text.strip()


def test_nfc_makes_one_byte_of_four_at_most():
    """Whatever it joins: the longest way to write each character, of characters that become its parts."""
    every = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    longest: dict[str, int] = defaultdict(int)
    for character in every:
        parts = unicodedata.normalize("NFD", character)
        longest[parts] = max(longest[parts], len(character.encode()))
    for character in every:
        written = unicodedata.normalize("NFC", character)
        parts = unicodedata.normalize("NFD", character)
        apart = max(longest[parts], sum(longest[part] for part in parts))
        assert apart <= _NFC * len(written.encode()), (character, apart)


LOSING = {
    "a normalizer that takes blanks away": byte_level(normalizers.Strip()),
    "a normalizer that makes less of a text": byte_level(normalizers.Sequence([normalizers.Replace("aaaa", "a")])),
    "a normalizer by pattern": byte_level(normalizers.Replace(Regex("a+"), "a")),
    "a normalizer that is not known": byte_level(normalizers.NFKC()),
    "a byte without a token": byte_level(lacks="Č"),
    "words with marks of their own": byte_level(end_of_word_suffix="</w>"),
    "words": Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")),
    "pieces": Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]")),
    "likely pieces": Tokenizer(models.Unigram([("a", 0.0), ("<unk>", -1.0)], 1, False)),
    "characters without a token for each byte": Tokenizer(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>")),
}


@pytest.mark.parametrize("kind", LOSING)
def test_nothing_is_said_where_text_can_vanish(kind):
    assert least(LOSING[kind]).of("a \f" * 50_000) == 0


@pytest.mark.parametrize(
    "cutting",
    [
        pre_tokenizers.WhitespaceSplit(),
        pre_tokenizers.Split(" ", "removed"),
        pre_tokenizers.Sequence([pre_tokenizers.Punctuation("removed"), pre_tokenizers.ByteLevel()]),
    ],
)
def test_nothing_is_said_where_cutting_into_words_drops_something(cutting):
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = cutting
    assert least(tokenizer).of(" , " * 50_000) == 0


def test_what_cannot_fit_is_refused_without_being_tokenized(open_mlx, random_model):
    engine = open_mlx(random_model)
    acceptance = Acceptance(engine.backend, engine.info)
    engine.backend._vocabulary._whole = engine.backend._vocabulary._rest = None
    huge = "word " * 200_000
    for chat, param in ((False, "prompt"), (True, "messages")):
        with pytest.raises(ContextLengthExceeded, match="context is 256 tokens") as refusal:
            acceptance.sequence(wire.Submit(rid=1, prompt=huge, max_tokens=1, chat=chat))
        assert refusal.value.param == param
