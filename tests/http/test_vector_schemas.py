"""The bodies of ``/v1/embeddings`` and ``/v1/rerank``: every form becomes the same work, and what is wrong is named."""

from __future__ import annotations

import pytest
from schema_cases import Limits, refused

from slimproc.http.openai.embeddings_schema import parse_embeddings
from slimproc.http.openai.rerank_schema import parse_rerank
from slimproc.request import Deadline


def embeddings(text: str):
    return parse_embeddings(text.encode())


@pytest.mark.parametrize(
    ("given", "prompts", "names"),
    [
        ('"a"', ["a"], ["input"]),
        ('["a"]', ["a"], ["input[0]"]),
        ('[ "a", "b"]', ["a", "b"], ["input[0]", "input[1]"]),
        ("[1, 2]", [[1, 2]], ["input"]),
        ("[[1, 2], [3]]", [[1, 2], [3]], ["input[0]", "input[1]"]),
    ],
)
def test_the_four_forms_of_input_and_what_each_item_is_called(given, prompts, names):
    call = embeddings(f'{{"input": {given}}}')
    assert (call.prompts, call.names, call.base64, call.dimensions, call.query) == (prompts, names, False, None, None)


@pytest.mark.parametrize(("given", "base64"), [("null", False), ('"float"', False), ('"base64"', True)])
def test_the_encoding_is_base64_only_when_asked_for(given, base64):
    assert embeddings(f'{{"input": "a", "encoding_format": {given}}}').base64 is base64


def test_a_call_becomes_work_of_its_model_and_deadline():
    call = embeddings('{"input": ["a", "b"], "model": "alias", "dimensions": 5, "user": "u"}')
    work = call.work(request_id="r", model=Limits("real"), deadline=Deadline(5.0))
    assert (work.id, work.model, work.sequences, work.dimensions) == ("r", "real", 2, 5)
    assert (work.deadline, work.capability) == (Deadline(5.0), "embed")


def test_2048_inputs_are_taken_and_one_more_is_not():
    assert len(parse_embeddings(b'{"input": [%b]}' % b",".join([b'"a"'] * 2048)).prompts) == 2048
    for item in (b'"a"', b"[1]"):
        body = b'{"input": [%b]}' % b",".join([item] * 2049)
        assert refused(parse_embeddings, body).param == "input"


def test_documents_may_be_strings_and_objects_in_one_list():
    call = parse_rerank(b'{"query": "q", "documents": ["a", {"text": "b", "title": "ignored"}], "top_n": 1}')
    assert (call.prompts, call.documents, call.query) == (["a", "b"], ["a", "b"], "q")
    assert (call.names, call.top_n, call.return_documents) == (["documents[0]", "documents[1]"], 1, False)
    work = call.work(request_id="r", model=Limits(), deadline=Deadline(5.0))
    assert (work.capability, work.query, work.names) == ("rerank", "q", ["documents[0]", "documents[1]"])


@pytest.mark.parametrize(("top_n", "wanted"), [("null", 2), ("1", 1), ("2", 2), ("1000000", 2)])
def test_top_n_is_at_most_all_documents(top_n, wanted):
    assert parse_rerank(b'{"query": "q", "documents": ["a", "b"], "top_n": %b}' % top_n.encode()).top_n == wanted
