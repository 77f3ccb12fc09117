"""The official OpenAI client, as its users use it: unchanged, with its defaults but for the number of retries."""

from __future__ import annotations

import openai
import pytest

from tests.serving import ServerProcess, fake, script

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tight(tmp_path_factory):
    """One slot and no queue, a small body limit, a short deadline, and comments on silent streams."""
    limits = {"max_json_body": 4096, "keepalive_after": 0.2}
    config = fake(slots=1, max_queue=0, request_timeout=1, context=100_000, aliases=["small"]) | limits
    config["models"]["broken"] = {"backend": "fake", "fake": {"load_error": "no weights"}}
    config["models"]["org/m:Q4 ü"] = {"backend": "fake"}
    with ServerProcess(tmp_path_factory.mktemp("tight"), config | {"default_model": "fake"}) as process:
        process.wait_metric(1, "replicas", model="fake", state="ready")
        yield process


def connect(server, **options) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", **({"max_retries": 0} | options))


@pytest.fixture
def client(server):
    with connect(server) as made:
        yield made


@pytest.fixture
def strict(tight):
    tight.wait_idle()
    with connect(tight) as made:
        yield made


def test_a_completion(client):
    answer = client.completions.create(model="fake", prompt="hello", max_tokens=3)
    assert answer.choices[0].text == " tok0 tok1 tok2"
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 3, 6)
    assert answer._request_id


def test_a_streamed_completion(client):
    chunks = list(client.completions.create(model="fake", prompt="hello", max_tokens=3, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == " tok0 tok1 tok2"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_chat(client):
    answer = client.chat.completions.create(model="alias", messages=USER, max_completion_tokens=2, n=2, seed=1)
    assert [choice.message.content for choice in answer.choices] == [" tok0 tok1"] * 2
    assert answer.choices[0].message.role == "assistant"
    assert answer.model == "fake"
    assert answer.usage.completion_tokens == 4


def test_a_streamed_chat_with_usage(client):
    stream = client.chat.completions.create(
        model="fake", messages=USER, max_tokens=2, n=2, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [" tok0 tok1"] * 2
    assert last.choices == []
    assert last.usage.completion_tokens == 4


def test_the_streaming_helper_puts_a_chat_together(client):
    messages = [{"role": "user", "content": script(tokens=["a", "b", "c"])}]
    with client.chat.completions.stream(model="fake", messages=messages) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == "abc"


def test_a_stream_that_is_left_is_cancelled(server, client):
    stream = client.completions.create(model="fake", prompt=script(token_latency=0.01), max_tokens=4000, stream=True)
    for _ in zip(range(3), stream, strict=False):
        pass
    stream.close()
    server.wait_idle()


def test_models_can_be_listed_and_retrieved_by_any_id(strict):
    ids = [model.id for model in strict.models.list()]
    assert ids == ["fake", "broken", "org/m:Q4 ü"]
    for name in ids:
        assert strict.models.retrieve(name).id == name
    assert strict.models.retrieve("small").id == "fake"
    with pytest.raises(openai.NotFoundError) as caught:
        strict.models.retrieve("nope")
    assert caught.value.code == "model_not_found"


def test_a_request_id_of_the_callers_own_comes_back(client):
    answer = client.with_options(default_headers={"x-request-id": "mine-1"}).completions.create(
        model="fake", prompt="hi", max_tokens=1
    )
    assert answer._request_id == "mine-1"


def chat(client, content="hi", **fields):
    return client.chat.completions.create(
        **({"model": "fake", "messages": [{"role": "user", "content": content}]} | fields)
    )


@pytest.mark.parametrize("stream", [True, False])
def test_each_refusal_is_the_clients_own_class(strict, stream):
    cases = [
        (lambda: chat(strict, temperature=9, stream=stream), openai.BadRequestError, 400, "invalid_request_error"),
        (lambda: chat(strict, model="nope", stream=stream), openai.NotFoundError, 404, "model_not_found"),
        (lambda: chat(strict, "x" * 5000, stream=stream), openai.APIStatusError, 413, "body_too_large"),
        (lambda: chat(strict, script(error_at=1), stream=stream), openai.InternalServerError, 500, "engine_error"),
        (lambda: chat(strict, model="broken", stream=stream), openai.InternalServerError, 503, "service_unavailable"),
    ]
    for call, kind, status, code in cases:
        with pytest.raises(kind) as caught:
            call()
        error = caught.value
        assert (error.status_code, error.code) == (status, code)
        assert error.request_id == error.response.headers["x-request-id"]
        assert error.message


def test_a_client_whose_base_url_lacks_its_end_is_told_the_path_that_there_is(strict):
    lost = strict.with_options(base_url=str(strict.base_url).removesuffix("v1/"))
    with pytest.raises(openai.NotFoundError, match=r"no route POST /chat/completions; there is /v1/chat/completions"):
        chat(lost)
    with pytest.raises(openai.NotFoundError, match=r"no route POST /images/generations$"):
        lost.images.generate(model="fake", prompt="x")


def test_paths_methods_and_types_are_the_clients_own_classes(strict):
    with pytest.raises(openai.NotFoundError) as caught:
        strict.images.generate(model="fake", prompt="x")
    assert caught.value.code == "not_found"
    with pytest.raises(openai.APIStatusError) as caught:
        strict.get("/completions", cast_to=object)
    assert (caught.value.status_code, caught.value.code) == (405, "method_not_allowed")
    with pytest.raises(openai.APIStatusError) as caught:
        strict.post("/completions", cast_to=object, body={}, options={"headers": {"Content-Encoding": "gzip"}})
    assert (caught.value.status_code, caught.value.code) == (415, "unsupported_media_type")


def test_overload_is_retried_and_a_deadline_is_not(tight, strict):
    with tight.stream(script(token_latency=0.01), max_tokens=90_000) as running:
        running.take(1)
        with pytest.raises(openai.InternalServerError) as caught:
            chat(strict)
        assert (caught.value.status_code, caught.value.code) == (503, "overloaded")
        assert int(caught.value.response.headers["retry-after"]) >= 1
    tight.wait_idle()
    before = tight.metric("requests_total", model="fake", outcome="timeout")
    with connect(tight, max_retries=3) as patient, pytest.raises(openai.InternalServerError) as caught:
        chat(patient, script(token_latency=0.01), max_tokens=90_000)
    assert (caught.value.status_code, caught.value.code) == (504, "timeout")
    assert tight.metric("requests_total", model="fake", outcome="timeout") == before + 1, "it was tried once"


def test_a_full_server_is_tried_again_until_it_has_room(tight, strict):
    rejected = tight.metric("rejected_total", model="fake", reason="overloaded")
    running = tight.begin(script(tokens=["x"], repeat=40, token_latency=0.02), max_tokens=100)
    tight.wait_sequences(1, 0, 0)
    with connect(tight, max_retries=5) as patient:
        assert chat(patient, max_tokens=1).choices[0].message.content == " tok0"
    assert tight.metric("rejected_total", model="fake", reason="overloaded") > rejected
    running.close()


@pytest.mark.parametrize("prompt", [script(error_at=3, token_latency=0.2), script(token_latency=0.01)])
def test_an_error_in_mid_stream_is_raised_where_the_stream_is_read(strict, prompt):
    stream = strict.completions.create(model="fake", prompt=prompt, max_tokens=90_000, stream=True)
    with pytest.raises(openai.APIError) as caught:
        for _ in stream:
            pass
    assert caught.value.code in ("engine_error", "timeout")


def test_comments_on_a_silent_stream_are_no_trouble(strict):
    prompt = script(tokens=["a", "b"], prefill_steps=3, prefill_latency=0.15, token_latency=0.3)
    assert [chunk.choices[0].text for chunk in strict.completions.create(model="fake", prompt=prompt, stream=True)] == [
        "a",
        "b",
        "",
    ]


def test_the_clients_optional_fields_are_no_trouble(client):
    answer = client.chat.completions.create(
        model="fake", messages=[{"role": "developer", "content": "x"}, {"role": "user", "content": "y", "name": "bob"}],
        temperature=0.5, top_p=0.9, presence_penalty=0.1, frequency_penalty=0.1, logit_bias={"1": 2}, user="me",
        metadata={"a": "b"}, store=False, service_tier="auto", stop=["never"], max_tokens=1, response_format={"type": "text"},
        tool_choice="none",
    )  # fmt: skip
    assert answer.choices[0].finish_reason == "length"
