"""Which texts count as a control token, or as a piece of one."""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimproc.chat.token_set import TokenSet, fold

CHATML = TokenSet(["<|im_start|>", "<|im_end|>"])

short = st.text("ab<|>", max_size=8)
token_texts = st.sets(st.text("ab<|>", min_size=2, max_size=5), min_size=1, max_size=5)


def test_folding_keeps_every_character_in_its_place():
    everything = "".join(chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000)
    assert len(fold(everything)) == len(everything)


def test_whatever_a_template_can_turn_into_an_ascii_letter_folds_to_that_letter():
    for code in range(sys.maxunicode + 1):
        char = chr(code)
        for cased in (char.lower(), char.upper()):
            if len(cased) == 1 and cased.isascii() and cased.isalpha():
                assert fold(char) == cased.lower(), hex(code)


@settings(deadline=None)
@given(token_texts, short)
def test_occurrences_are_every_place_that_spells_a_token(tokens, text):
    spelled = {(i, j) for i in range(len(text)) for j in range(i, len(text) + 1) if text[i:j] in tokens}
    assert set(TokenSet(tokens).occurrences(text)) == {(i, j) for i, j in spelled if not text[i:j].isspace()}


@settings(deadline=None)
@given(token_texts, short)
def test_open_starts_are_the_endings_that_a_token_begins_with(tokens, text):
    expected = [i for i in range(len(text)) if any(t.startswith(text[i:]) and t != text[i:] for t in tokens)]
    assert list(TokenSet(tokens).open_starts(text)) == expected


@settings(deadline=None)
@given(token_texts, short)
def test_an_open_end_is_a_beginning_that_a_token_ends_with(tokens, text):
    heads = (text[: i + 1] for i in range(len(text)))
    assert TokenSet(tokens).is_open_end(text) == any(t.endswith(h) and t != h for h in heads for t in tokens)


@pytest.mark.parametrize("ordinary", ["", "\n", "a", " ", "\n\n", " \t "])
def test_one_character_and_blank_texts_are_ordinary_writing(ordinary):
    tokens = TokenSet([ordinary, "<s>"])
    assert list(tokens.occurrences(f"a \n\n \t {ordinary} b")) == []
    assert list(tokens.occurrences("a<s>")) == [(1, 4)]


def test_a_shorter_token_at_the_end_is_not_taken_for_a_longer_one():
    assert list(TokenSet(["|b", "|b<"]).occurrences("a|b")) == [(1, 3)]


def test_no_control_tokens_at_all_is_fine():
    tokens = TokenSet([])
    assert list(tokens.occurrences("<s>")) == []
    assert not tokens.has_gap("{{ '<' + name + '>' }}")


@pytest.mark.parametrize(
    ("template", "gap"),
    [
        ("{{ '<|im_start|>' + role + '\n' + content + '<|im_end|>' }}", False),
        ("<|im_start|>{{ role }}\n{{ content }}<|im_end|>", False),
        ("{{ '<|' + role + '|>' }}", True),
        ("<|{{ role }}|>", True),
        ("<| {{- role -}} |>", True),
        ("<|IM_{% if a %}{{ role }}{% endif %}|>", True),
        ("<|{{ role }}", False),
    ],
)
def test_a_gap_is_a_token_that_the_template_opens_and_closes_around_an_expression(template, gap):
    assert CHATML.has_gap(template) is gap


def test_six_thousand_tokens_are_all_found():
    tokens = TokenSet([f"<unused{number}>" for number in range(6000)] + ["😀a", "🙂<|x|>"])
    text = "<unused5999>😀a<unused6000><UNUSED1>🙂<|x|>"
    assert [text[i:j] for i, j in tokens.occurrences(text)] == ["<unused5999>", "😀a", "🙂<|x|>"]
    assert [text[i] for i in tokens.starts(fold(text))] == ["<", "😀", "<", "🙂"]
