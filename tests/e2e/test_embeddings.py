"""``/v1/embeddings`` and ``/v1/rerank`` from outside: their forms, their limits, and what admission does with them."""

from __future__ import annotations

import base64
import math
import struct
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.serving import ServerProcess, fake, script, wait_until

EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
SIZE = 8
"""Values of the fake backend's vectors."""
SLOW = script(prefill_steps=100_000, prefill_latency=0.01)


def embed(server: ServerProcess, texts, **fields):
    return server.post(EMBEDDINGS, {"input": texts, **fields})


def begin(server: ServerProcess, texts):
    """Send a request and wait for nothing."""
    return server.begin(None, path=EMBEDDINGS, input=texts)


def vectors(answer) -> list[list[float]]:
    assert answer.status == 200, answer.body
    data = answer.json["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    assert {entry["object"] for entry in data} == {"embedding"}
    return [entry["embedding"] for entry in data]


def unpacked(text: str) -> list[float]:
    raw = base64.b64decode(text, validate=True)
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


# --- the answer -------------------------------------------------------------------------------------------------------


def test_the_answer_has_openais_form_and_counts_every_token(server):
    answer = embed(server, ["hello", "hi"], user="someone")
    assert answer.json.keys() == {"object", "model", "usage", "data"}
    assert (answer.json["object"], answer.json["model"]) == ("list", "fake")
    assert answer.json["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    for vector in vectors(answer):
        assert len(vector) == SIZE
        assert math.hypot(*vector) == pytest.approx(1, abs=1e-6)


def test_base64_holds_the_very_numbers_of_float_and_float_is_the_default(server):
    texts = ["one", "two", "three"]
    plain = vectors(embed(server, texts))
    assert vectors(embed(server, texts, encoding_format="float")) == plain
    assert [unpacked(text) for text in vectors(embed(server, texts, encoding_format="base64"))] == plain
    assert vectors(embed(server, texts, encoding_format=None)) == plain


def test_texts_and_their_token_ids_have_the_same_vectors_in_every_form(server):
    texts = ["first text", "second"]
    ids = [server.post("/tokenize", {"content": text}).json["tokens"] for text in texts]
    wanted = vectors(embed(server, texts))
    assert vectors(embed(server, texts[0])) == wanted[:1]
    assert vectors(embed(server, ids[0])) == wanted[:1]
    assert vectors(embed(server, ids)) == wanted


def test_many_more_inputs_than_slots_come_back_in_their_order(server):
    texts = [f"text {number}" for number in range(300)]
    got = vectors(embed(server, texts))
    assert len({tuple(vector) for vector in got}) == 300
    assert got[::50] == [vectors(embed(server, text))[0] for text in texts[::50]]


def test_a_large_answer_as_numbers_is_whole(server):
    got = vectors(embed(server, [str(number) for number in range(2048)]))
    assert len(got) == 2048


def test_dimensions_keeps_the_first_values_and_the_length_of_one(server):
    (whole,) = vectors(embed(server, "text"))
    (cut,) = vectors(embed(server, "text", dimensions=3))
    norm = math.hypot(*whole[:3])
    assert cut == pytest.approx([value / norm for value in whole[:3]], abs=1e-6)
    assert vectors(embed(server, "text", dimensions=SIZE)) == [whole]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", "", "b"]}, "input[1]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": [1, "a"]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": 7}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "encoding_format": "x"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": SIZE + 1}, "dimensions"),
        ({"input": "a", "dimensions": "3"}, "dimensions"),
        ({"input": ["fine", "x" * 9000]}, "input[1]"),
        ({"input": [[1], [1, 10**6]]}, "input[1]"),
        ({"input": "x" * 9000}, "input"),
        ({"input": "a", "model": "nobody"}, "model"),
    ],
)
def test_what_is_wrong_with_a_body_is_a_400_or_404_that_names_it(server, fields, param):
    answer = server.post(EMBEDDINGS, fields)
    assert answer.status == (404 if param == "model" else 400), answer.body
    assert answer.error["param"] == param
    assert server.replica()["restarts"] == 0


def test_an_input_that_fills_the_context_exactly_is_taken_and_one_token_more_is_not(serve):
    server = serve(fake(context=16))
    assert embed(server, "x" * 32).json["usage"]["prompt_tokens"] == 16
    answer = embed(server, ["ok", "x" * 33])
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert "input[1]" in answer.error["message"]
    assert "17" in answer.error["message"]


def test_the_other_method_is_a_405(server):
    assert server.get(EMBEDDINGS).status == 405
    assert server.get(RERANK).status == 405


# --- ranks ------------------------------------------------------------------------------------------------------------

DOCUMENTS = ["nothing of it", "red and blue", "a red car", "red blue car"]


def test_documents_come_back_best_first_with_the_place_they_had(server):
    answer = server.post(RERANK, {"query": "red blue car", "documents": [DOCUMENTS[0], *DOCUMENTS[1:]]})
    assert answer.json.keys() == {"id", "object", "model", "results", "usage"}
    results = answer.json["results"]
    assert [result["index"] for result in results] == [3, 1, 2, 0]
    scores = [result["relevance_score"] for result in results]
    assert scores == pytest.approx([1, 2 / 3, 2 / 3, 0])
    assert all(result.keys() == {"index", "relevance_score"} for result in results)
    tokens = sum(math.ceil(len("red blue car" + document) / 2) for document in DOCUMENTS)
    assert answer.json["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


@pytest.mark.parametrize(("top_n", "count"), [(1, 1), (2, 2), (99, 4), (None, 4)])
def test_top_n_cuts_the_list_and_texts_come_back_only_when_asked_for(server, top_n, count):
    body = {"query": "red", "documents": [{"text": text} for text in DOCUMENTS], "top_n": top_n}
    results = server.post(RERANK, body | {"return_documents": True}).json["results"]
    assert len(results) == count
    for result in results:
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "q"}, "documents"),
        ({"query": "q", "documents": []}, "documents"),
        ({"query": "q", "documents": "a"}, "documents"),
        ({"query": "q", "documents": ["a", ""]}, "documents[1]"),
        ({"query": "q", "documents": ["a", {"text": ""}]}, "documents[1]"),
        ({"query": "q", "documents": ["a", 3]}, "documents"),
        ({"query": "q", "documents": ["a", {"title": "x"}]}, "documents[1].text"),
        ({"query": "q", "documents": ["a"] * 2049}, "documents"),
        ({"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
        ({"query": "q", "documents": ["a", "x" * 9000]}, "documents[1]"),
    ],
)
def test_what_is_wrong_with_a_rerank_body_is_a_400_that_names_it(server, fields, param):
    answer = server.post(RERANK, fields)
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param


# --- the same work as any other ---------------------------------------------------------------------------------------


def test_the_model_list_says_what_a_model_can_do(server):
    assert server.get("/v1/models/fake").json["capabilities"] == ["generate", "embed", "rerank"]


def test_a_vector_counts_in_the_metrics_and_the_log_as_one_request(serve):
    server = serve(fake() | {"log_json": True})
    embed(server, ["hello", "hi"])
    assert server.metric("requests_total", model="fake", outcome="ok") == 1
    assert server.metric("prompt_tokens_total", model="fake") == 4
    assert server.metric("generated_tokens_total", model="fake") == 0
    assert server.metric("request_duration_seconds_count", model="fake") == 1
    assert server.metric("time_to_first_token_seconds_count", model="fake") == 0
    (line,) = server.records("generation finished")
    assert (line["task"], line["outcome"], line["prompt_tokens"], line["completion_tokens"]) == ("embed", "ok", 4, 0)
    assert line["duration_ms"] > 0
    assert line.get("finish_reason") is None


def test_a_client_that_leaves_frees_every_slot_of_its_inputs(serve):
    server = serve(fake(slots=2, context=1000))
    for leave in ("close", "reset"):
        before = server.metric("requests_total", model="fake", outcome="cancelled")
        pending = begin(server, [SLOW] * 20)
        server.wait_sequences(2)
        getattr(pending, leave)()
        server.wait_metric(before + 1, "requests_total", model="fake", outcome="cancelled")
        server.wait_idle()
    assert embed(server, "hi").status == 200


def test_the_inputs_of_one_request_are_spread_over_the_replicas(serve):
    server = serve(fake(replicas=2, slots=2, context=1000))
    pending = begin(server, ["x" * 300 + "\n" + SLOW] * 9)
    server.wait_sequences(2, 2)
    pending.close()
    server.wait_idle()
    texts = [f"{'same beginning ' * 20}{number}" for number in range(40)]
    assert len({tuple(vector) for vector in vectors(embed(server, texts))}) == 40


def test_a_full_queue_and_the_deadline_hold_for_vectors_too(serve):
    server = serve(fake(slots=1, max_queue=1, context=1000))
    running = begin(server, SLOW)
    server.wait_sequences(1)
    waiting = begin(server, "hi")
    server.wait_queued(1)
    refused = embed(server, "hi")
    assert (refused.status, refused.error["code"]) == (503, "overloaded")
    assert int(refused.headers["Retry-After"]) >= 1
    assert server.post(RERANK, {"query": "q", "documents": ["d"]}).status == 503
    running.close()
    assert waiting.answer().status == 200
    late = server.post(EMBEDDINGS, {"input": SLOW}, X_Request_Timeout="0.2")
    assert (late.status, late.error["code"]) == (504, "timeout")
    server.wait_idle()


def test_inputs_whose_engine_dies_are_read_once_more_and_the_answer_is_whole(serve):
    server = serve(fake(slots=2, context=1000))
    slow = script(prefill_steps=20, prefill_latency=0.05)
    texts = ["done before", slow, "done before, too", slow]
    pending = begin(server, texts)
    server.wait_sequences(2)
    server.kill_engine()
    answer = pending.answer()
    alone = {text: vectors(embed(server, text))[0] for text in dict.fromkeys(texts)}
    assert vectors(answer) == [alone[text] for text in texts]
    assert server.replica()["restarts"] == 1


def test_an_input_that_kills_its_engine_twice_is_a_500_that_no_sdk_tries_again(serve):
    server = serve(fake())
    answer = embed(server, ["fine", script(die_at=1)])
    assert (answer.status, answer.error["code"]) == (500, "engine_crashed")
    assert answer.headers["x-should-retry"] == "false"
    wait_until(lambda: embed(server, "fine").status == 200, "it is back")


def test_an_engine_that_fails_on_one_input_fails_that_request_alone(server):
    answer = embed(server, ["fine", script(error_at=1)])
    assert (answer.status, answer.error["code"]) == (500, "engine_error")
    server.wait_idle()
    assert embed(server, "fine").status == 200
    bad = embed(server, ["fine", "!fake {"])
    assert (bad.status, bad.error["param"]) == (400, "input[1]")


def test_vectors_and_generations_of_two_models_go_on_beside_each_other(serve):
    config = fake(slots=4, token_latency=0.001)
    config["models"]["vectors"] = {"backend": "fake", "slots": 2}
    server = serve(config | {"default_model": "fake"})
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:

        def vector(number: int):
            return client.embeddings.create(model="vectors", input=[f"text {number}", "same"]).data

        def text(number: int) -> str:
            return client.completions.create(model="fake", prompt=f"p{number}", max_tokens=20).choices[0].text

        with ThreadPoolExecutor(12) as pool:
            embedded = [pool.submit(vector, number) for number in range(24)]
            texts = [pool.submit(text, number) for number in range(12)]
            data = [future.result() for future in embedded]
            assert {future.result() for future in texts} == {"".join(f" tok{number}" for number in range(20))}
    assert len({tuple(one.embedding) for one, _ in data}) == 24
    assert len({tuple(same.embedding) for _, same in data}) == 1
