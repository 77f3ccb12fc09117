"""Which tokens a grammar allows, on a vocabulary of bytes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from slimproc.engines.grammar import matcher as matcher_module
from slimproc.engines.grammar.library import GrammarRefusedError, translate
from slimproc.engines.grammar.matcher import GrammarError
from slimproc.engines.grammar.vocabulary import GrammarVocabulary
from slimproc.request import GrammarSpec
from tests.grammars import PERSON, byte_vocabulary, matcher_of, schema, valid

END = 2
VOCABULARY = byte_vocabulary()


def spec(kind, text):
    return GrammarSpec(kind, text, "p")


def allowed(matcher) -> set[int]:
    return set(np.flatnonzero(matcher.mask()))


def take(matcher, text: str | bytes) -> None:
    for byte in text.encode() if isinstance(text, str) else text:
        assert byte + 3 in allowed(matcher), (text, byte)
        matcher.accept(byte + 3)


def accepts(what: GrammarSpec, text: str) -> bool:
    matcher = matcher_of(what, VOCABULARY)
    for byte in text.encode():
        if byte + 3 not in allowed(matcher):
            return False
        matcher.accept(byte + 3)
    return END in allowed(matcher)


def test_a_mask_is_one_bool_a_token_and_control_tokens_are_never_in_it():
    matcher = matcher_of(spec("regex", "(.|\n)*"), VOCABULARY)
    mask = matcher.mask()
    assert (mask.shape, mask.dtype) == ((259,), np.bool_)
    assert not mask[:2].any()


def test_the_end_is_allowed_only_where_the_grammar_is_complete():
    matcher = matcher_of(spec("regex", "ab?"), VOCABULARY)
    assert allowed(matcher) == {ord("a") + 3}
    take(matcher, "a")
    assert allowed(matcher) == {END, ord("b") + 3}
    assert not matcher.stopped
    take(matcher, "b")
    assert matcher.stopped
    assert allowed(matcher) == {END}


def test_a_token_that_is_not_allowed_is_an_error_and_the_last_word():
    matcher = matcher_of(spec("regex", "ab"), VOCABULARY)
    with pytest.raises(GrammarError):
        matcher.accept(ord("b") + 3)
    assert not matcher.stopped


def test_masks_that_take_too_long_all_together_are_an_error(monkeypatch):
    matcher = matcher_of(spec("regex", "a*"), VOCABULARY)
    clock = iter(range(10**6))
    monkeypatch.setattr(matcher_module.time, "thread_time", lambda: float(next(clock)) * 0.6)
    matcher.mask()
    with pytest.raises(GrammarError, match="too much time"):
        matcher.mask()


@pytest.mark.parametrize(
    "text",
    ["a/b", 'it\'s "q"', "é🙂", "new\nline", "a|b(c)[d]{2}", "<x>", "\\d", "#&~-^$. ", "yes"],
)
def test_a_choice_is_taken_literally_whatever_its_characters(text):
    what = spec("choice", json.dumps([text, "other"]))
    assert accepts(what, text)
    assert accepts(what, "other")
    assert not accepts(what, text[:-1])


def test_a_grammar_may_be_written_in_larks_notation_or_in_gbnf():
    lark = spec("grammar", 'start: greeting NAME\ngreeting: "hello " | "bye "\nNAME: /[a-z]+/')
    gbnf = spec("grammar", 'root ::= greeting name\ngreeting ::= "hello " | "bye "\nname ::= [a-z]+')
    for what in (lark, gbnf):
        assert accepts(what, "hello anna")
        assert accepts(what, "bye bo")
        assert not accepts(what, "hi anna")


@pytest.mark.parametrize("text", ['{"a":[1,2]}', '{ "a": [1, 2] }', '{\n  "a": []}', '{"a":\n\t[ 7 ]\n}'])
def test_usual_layouts_of_json_are_allowed(text):
    assert accepts(
        schema({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}), text
    )


def test_blanks_cannot_go_on_for_ever():
    matcher = matcher_of(schema({"type": "object"}), VOCABULARY)
    take(matcher, "{\n")
    for _ in range(100):
        blanks = allowed(matcher) & {byte + 3 for byte in b" \t\n\r"}
        if not blanks:
            break
        matcher.accept(int(max(blanks)))
    else:
        raise AssertionError("100 blanks in a row")


def test_a_random_walk_through_a_schema_gives_json_that_it_allows():
    dice = np.random.default_rng(3)
    for _ in range(10):
        matcher, text = matcher_of(schema(PERSON), VOCABULARY), b""
        while not matcher.stopped:
            token = int(dice.choice(np.flatnonzero(matcher.mask())))
            matcher.accept(token)
            text += VOCABULARY.tokens[token]
        assert valid(text.decode(), PERSON), text


def test_forced_text_is_spelled_with_the_models_own_tokens():
    pieces = [b"", b'{"', b"na", b"me", b"n", b"a", b"m", b"e", b'"', b"{", b":", b"name", b"1", b"}"]
    what = schema(
        {"type": "object", "properties": {"name": {"const": 1}}, "required": ["name"], "additionalProperties": False}
    )
    own = {"{": [9], '{"name"': [1, 2, 3, 8]}
    by_pairs = GrammarVocabulary(pieces, [0], own.__getitem__)
    matcher = matcher_of(what, by_pairs)
    matcher.accept(1)
    assert allowed(matcher) == {2}, "as it says, not the longest"
    wrong = GrammarVocabulary(pieces, [0], lambda _text: [9])
    matcher = matcher_of(what, wrong)
    matcher.accept(1)
    assert allowed(matcher) == {11}, "a spelling of another text does not count"


def test_a_refusal_is_one_line_of_bounded_length():
    with pytest.raises(GrammarRefusedError) as refusal:
        matcher_of(spec("regex", "(" * 5000), VOCABULARY)
    assert len(str(refusal.value)) <= 300
    assert "\n" not in str(refusal.value)


def test_nesting_that_exhausts_the_converter_is_refused():
    with pytest.raises(GrammarRefusedError):
        translate(spec("grammar", "root ::= " + "(" * 20000 + '"a"' + ")" * 20000))
