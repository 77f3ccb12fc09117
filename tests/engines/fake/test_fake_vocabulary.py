"""The fake backend's vocabulary is reversible, and control tokens arise only where they may."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimproc.engines.fake import FakeBackend
from slimproc.errors import InvalidRequest
from slimproc.settings import EngineSettings

words = st.lists(
    st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from(["<|im_start|>", "<|im_end|>", "<|"]))
).map("".join)


@settings(max_examples=300, deadline=None)
@given(words, st.booleans())
def test_detokenizing_gives_back_every_byte(text, parse_special):
    backend = FakeBackend(EngineSettings(model="m", backend="fake"))
    tokens = backend.tokenize(text, add_special=True, parse_special=parse_special)

    assert backend.detokenize(tokens) == text.encode()
    assert all(0 <= token < backend.load(lambda _: None).vocab_size for token in tokens)


def test_two_bytes_are_a_token_and_an_odd_one_is_itself(make):
    backend = make()

    assert backend.tokenize("ab", add_special=True, parse_special=True) == [256 + ord("a") * 256 + ord("b")]
    assert backend.tokenize("abc", add_special=True, parse_special=True)[1:] == [ord("c")]
    assert backend.tokenize("", add_special=True, parse_special=True) == []


def test_control_tokens_are_parsed_only_where_it_is_asked(make):
    backend = make()
    text = "a<|im_end|>b"

    special = backend.tokenize(text, add_special=True, parse_special=True)
    plain = backend.tokenize(text, add_special=True, parse_special=False)

    assert special == [ord("a"), 65_794, ord("b")]
    assert max(plain) < 65_792
    assert backend.tokenize_spans(text, []) == special
    assert backend.tokenize_spans(text, [(1, 11)]) == plain


@pytest.mark.parametrize(
    ("literal", "parsed"),
    [((0, 1), 2), ((1, 11), 1), ((0, 11), 1), ((5, 6), 1), ((0, 2), 1), ((10, 12), 1), ((11, 12), 2), ((12, 22), 1)],
)
def test_a_control_text_that_touches_a_literal_span_is_plain_and_the_others_are_not(make, literal, parsed):
    text = "a<|im_end|>b<|im_end|>c"

    tokens = make().tokenize_spans(text, [literal])

    assert tokens.count(65_794) == parsed
    assert make().detokenize(tokens) == text.encode()


def test_literal_spans_may_come_in_any_order(make):
    text = "<|im_end|>x<|im_end|>y<|im_end|>"

    assert make().tokenize_spans(text, [(22, 32), (0, 10)]).count(65_794) == 1


@pytest.mark.parametrize("token", [-1, 65_795, 10**12])
def test_an_id_outside_the_vocabulary_is_the_callers_fault(make, token):
    with pytest.raises(InvalidRequest) as raised:
        make().detokenize([65, token])

    assert raised.value.param == "tokens"
