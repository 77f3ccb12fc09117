"""Vocabularies that put a space before a text: where a text is put together from parts, no space comes between them."""

from __future__ import annotations

import pytest

from slimproc.engines.llama_cpp.vocabulary import Vocabulary
from tests.engines.llama_cpp.kinds import sentencepiece
from tests.models import CONTROL

USER, END = "<|im_start|>user\n", "<|im_end|>\n"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return sentencepiece(tmp_path_factory.mktemp("spm") / "spm.gguf")


@pytest.fixture
def vocabulary(open_engine, path) -> Vocabulary:
    return open_engine(path).backend._vocabulary


def spelled(vocabulary: Vocabulary, tokens: list[int]) -> list[str]:
    return [vocabulary.spelled(token).decode("utf-8", "replace") for token in tokens]


def chat(*contents: str) -> tuple[str, list[tuple[int, int]]]:
    """A chat's text, and the spans where its callers have spelled control tokens."""
    text, spans = "", []
    for content in contents:
        text += USER
        for control in CONTROL:
            at = content.find(control)
            spans += [(len(text) + at, len(text) + at + len(control))] if at >= 0 else []
        text += content + END
    return text, sorted(spans)


def test_a_text_begins_with_a_space_and_so_does_what_follows_a_control_token(vocabulary):
    tokens = vocabulary.tokenize("hi<|im_end|>hi", add_bos=False, parse_special=True)
    assert spelled(vocabulary, tokens) == [" hi", "<|im_end|>", " hi"]


@pytest.mark.parametrize(
    "content",
    ["hi <|im_end|> now", "hi<|im_end|>now", "<|im_end|>", "<|im_start|>hi", "hi<|im_end|>", "a<|im_end|>\n\nb", "é<|im_end|>é"],
)  # fmt: skip
def test_what_looks_like_a_control_token_leaves_its_neighbours_as_they_were(vocabulary, content):
    """But for the tokens of the spelling itself, a chat has the tokens that it has with another word of the same length
    there which is as little a token; and no space that nobody wrote.
    """
    text, spans = chat(content, "hi")
    tokens = vocabulary.tokenize_spans(text, spans)
    other = text
    for start, end in spans:
        other = other[:start] + "\0" * (end - start) + other[end:]
    expected = "".join(spelled(vocabulary, vocabulary.tokenize(other, add_bos=True, parse_special=True)))
    for start, end in spans:
        expected = expected.replace("\0" * (end - start), text[start:end], 1)
    assert "".join(spelled(vocabulary, tokens)) == expected
    assert tokens.count(2) == 2, "only the template's own ends are tokens"


def test_a_chat_without_such_words_is_tokenized_as_a_whole(vocabulary):
    text, _ = chat("hi now", "hi")
    assert vocabulary.tokenize_spans(text, []) == vocabulary.tokenize(text, add_bos=True, parse_special=True)


@pytest.mark.parametrize("text", ["now", " now", "\nx", "\n\n", "x", "<|im_end|>", "é", "\x01", "\n"])
def test_a_continuation_has_exactly_its_own_text(vocabulary, text):
    """Also where the vocabulary has a word for a line feed and what comes after it."""
    tokens = vocabulary.tokenize_continuation(text)
    assert b"".join(map(vocabulary.spelled, tokens)).decode() == text
    assert not set(tokens) & {0, 1, 2}


def test_no_continuation_of_nothing(vocabulary):
    assert vocabulary.tokenize_continuation("") == []


def test_a_template_for_ranking_puts_no_spaces_around_its_words(vocabulary):
    tokens = vocabulary.tokenize_pair("hi", "now", "<|im_start|>a: {query}\n{document}<|im_end|>")
    assert "".join(spelled(vocabulary, tokens)) == "<|im_start|> a: hi\nnow<|im_end|>"
