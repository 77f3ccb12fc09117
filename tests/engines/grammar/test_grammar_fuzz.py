"""Schemas that nobody thought of: whatever is compiled gives only what it allows."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slimproc.engines.grammar import library
from slimproc.engines.grammar.matcher import GrammarMatcher
from tests.grammars import byte_vocabulary, schema, valid

VOCABULARY = byte_vocabulary()
TOKENIZER = library.make_tokenizer(VOCABULARY)
MOST_BYTES = 2000

names = st.text(min_size=1, max_size=6)
leaves = st.one_of(
    st.builds(lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span}, st.integers(-300, 300), st.integers(0, 50)),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 5)),
    st.builds(lambda values: {"enum": values}, st.lists(names | st.integers(-5, 5) | st.none(), min_size=1, max_size=4)),
)  # fmt: skip


def lists(items):
    return st.builds(
        lambda item, least, more: {"type": "array", "items": item, "minItems": least, "maxItems": least + more},
        items, st.integers(0, 2), st.integers(0, 2),
    )  # fmt: skip


def objects(values):
    return st.builds(
        lambda known, some: {
            "type": "object",
            "properties": known,
            "required": [name for number, name in enumerate(known) if some >> number & 1],
            "additionalProperties": False,
        },
        st.dictionaries(names, values, max_size=4), st.integers(0, 15),
    )  # fmt: skip


@given(st.recursive(leaves, lambda inner: lists(inner) | objects(inner), max_leaves=6), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_a_random_walk_through_any_schema_gives_json_that_it_allows(what, seed):
    compiled = library.compile_grammar(TOKENIZER, library.translate(schema(what)))
    dice = np.random.default_rng(seed)
    matcher, text = GrammarMatcher(compiled, len(VOCABULARY.tokens)), b""
    while not matcher.stopped and len(text) < MOST_BYTES:
        token = int(dice.choice(np.flatnonzero(matcher.mask())))
        if token in VOCABULARY.ends:
            break
        matcher.accept(token)
        text += VOCABULARY.tokens[token]
    assert len(text) < MOST_BYTES
    assert valid(text.decode(), what), text
