"""Vectors and ranks of real files through the whole server, with the official client where it has a call for them."""

from __future__ import annotations

import gguf
import numpy as np
import openai
import pytest

from tests.minilm import reference_ids, reference_vector, tiny_bert, write_minilm
from tests.models import scripted, tiny_random
from tests.serving import CHAT, COMPLETIONS, ServerProcess

TEXTS = ["Name three prime numbers.", "2, 3 and 5 are prime.", "The weather is fine today."]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vectors")
    files = {
        "minilm": write_minilm(folder / "minilm.gguf"),
        "ranker": tiny_bert(folder / "ranker.gguf", pooling=gguf.PoolingType.RANK),
        "writer": tiny_random(folder / "writer.gguf"),
        "wide": scripted(folder / "wide.gguf", least_size=6144),
    }
    entries = {name: {"backend": "llama_cpp", "path": str(path), "threads": 1} for name, path in files.items()}
    entries["wide"] |= {"pooling": "last", "context": 64}
    process = ServerProcess(folder, {"models": entries, "default_model": "minilm", "ring_size": "64KiB"})
    yield process.wait_ready()
    process.close()


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def test_the_official_client_gets_the_models_vectors_by_default_and_as_numbers(client):
    by_default = client.embeddings.create(model="minilm", input=TEXTS)
    as_numbers = client.embeddings.create(model="minilm", input=TEXTS, encoding_format="float")
    for packed, plain in zip(by_default.data, as_numbers.data, strict=True):
        # The two requests may have met other texts in their batches, which changes the last bits of a float32.
        assert packed.embedding == pytest.approx(plain.embedding, abs=1e-5)
    assert [entry.index for entry in by_default.data] == [0, 1, 2]
    assert by_default.usage.prompt_tokens == by_default.usage.total_tokens == sum(len(reference_ids(t)) for t in TEXTS)
    for text, entry in zip(TEXTS, by_default.data, strict=True):
        assert np.dot(entry.embedding, reference_vector(text)) >= 0.9999


def test_the_official_client_may_cut_vectors_and_send_token_ids(client):
    ids = [reference_ids(text) for text in TEXTS]
    cut = client.embeddings.create(model="minilm", input=ids, dimensions=100)
    for text, entry in zip(TEXTS, cut.data, strict=True):
        wanted = reference_vector(text)[:100]
        assert len(entry.embedding) == 100
        assert np.dot(entry.embedding, wanted / np.linalg.norm(wanted)) >= 0.9999


def test_one_long_text_among_short_ones_is_computed_or_refused_by_its_name(server, client):
    fits = client.embeddings.create(model="minilm", input=["x", "word " * 510, "y"])
    assert fits.usage.prompt_tokens == 3 + 512 + 3
    with pytest.raises(openai.BadRequestError) as refusal:
        client.embeddings.create(model="minilm", input=["x", "word " * 600, "y"])
    assert (refusal.value.param, refusal.value.code) == ("input[1]", "context_length_exceeded")
    assert "602" in refusal.value.message
    assert all(replica["restarts"] == 0 for replica in server.replicas())


def test_vectors_wider_than_a_frame_of_the_ring_arrive_whole(client):
    one, other = client.embeddings.create(model="wide", input=["ab", "abc"]).data
    assert len(one.embedding) == len(other.embedding) == 6144
    assert np.linalg.norm(one.embedding) == pytest.approx(1, abs=1e-5)
    assert client.embeddings.create(model="wide", input="ab").data[0].embedding == pytest.approx(
        one.embedding, abs=1e-5
    )


def test_a_model_with_a_head_for_ranking_ranks(server):
    documents = ["a b c", "d e f", "g", "h i"]
    answer = server.post("/v1/rerank", {"model": "ranker", "query": "a b", "documents": documents})
    results = answer.json["results"]
    scores = [result["relevance_score"] for result in results]
    assert sorted(scores, reverse=True) == scores
    assert sorted(result["index"] for result in results) == [0, 1, 2, 3]
    assert all(0 < score < 1 for score in scores)
    assert len(set(scores)) == 4
    top = server.post("/v1/rerank", {"model": "ranker", "query": "a b", "documents": documents, "top_n": 2})
    assert [result["index"] for result in top.json["results"]] == [result["index"] for result in results[:2]]


@pytest.mark.parametrize(
    ("model", "path", "body", "says"),
    [
        ("minilm", COMPLETIONS, {"prompt": "x"}, "does not generate text: it makes embeddings"),
        ("minilm", CHAT, {"messages": [{"role": "user", "content": "x"}]}, "does not generate text"),
        ("minilm", "/v1/rerank", {"query": "q", "documents": ["d"]}, "has no head to rank documents with"),
        ("ranker", "/v1/embeddings", {"input": "x"}, "does not make embeddings: it ranks documents"),
        ("writer", "/v1/embeddings", {"input": "x"}, "does not make embeddings: it generates text"),
        ("writer", "/v1/rerank", {"query": "q", "documents": ["d"]}, "has no head to rank documents with"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_wrong_route_for_a_model_is_a_400_that_says_what_it_does(server, model, path, body, says, stream):
    answer = server.post(path, {"model": model, "stream": stream, **body})
    assert (answer.status, answer.error["param"]) == (400, "model"), answer.body
    assert says in answer.error["message"]


def test_the_model_list_says_what_each_is_for(server):
    listed = {model["id"]: model["capabilities"] for model in server.get("/v1/models").json["data"]}
    assert listed == {"minilm": ["embed"], "ranker": ["rerank"], "writer": ["generate"], "wide": ["embed"]}
