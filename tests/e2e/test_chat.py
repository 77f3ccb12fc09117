"""``POST /v1/chat/completions`` with the model's template and with the configuration's."""

from __future__ import annotations

import pytest

from tests.serving import fake, script, wait_until

ECHO = script(echo=True)
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def text_parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def post(server, *messages, **fields):
    return server.post("/v1/chat/completions", {"messages": list(messages), **fields})


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def rendered(server, *messages):
    """What the engine was given for these messages and a last one that asks for the echo."""
    answer = post(server, *messages, said("user", ECHO))
    assert answer.status == 200, answer.body
    return answer.text.replace(f"<|im_start|>user\n{ECHO}<|im_end|>\n<|im_start|>assistant\n", "")


def test_an_answer_has_openais_shape(server):
    body = post(server, said("user", script(tokens=["Hi", "!"]))).json
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    assert body.pop("usage")["completion_tokens"] == 2
    assert body == {
        "object": "chat.completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi!", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
    }


def test_the_models_own_template_renders_the_messages(server):
    assert post(server, said("system", "Be brief."), said("user", ECHO)).text == (
        f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{ECHO}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_parts_are_joined_by_a_newline_for_every_role(server):
    for role in ("system", "developer", "user", "assistant", "tool"):
        shown = "system" if role == "developer" else role
        text = rendered(server, said(role, text_parts("A", "B"), tool_call_id="x"))
        assert text == f"<|im_start|>{shown}\nA\nB<|im_end|>\n"


def test_an_assistants_null_or_absent_content_renders_as_nothing(server):
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    for turn in (
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "assistant", "tool_calls": calls},
    ):
        text = rendered(server, said("user", "x"), turn, said("tool", "42", tool_call_id="c1"))
        assert "None" not in text
        assert "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n42<|im_end|>" in text


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ([said("user", None)], "messages[0].content"),
        ([{"role": "user"}], "messages[0]"),
        ([said("user", [])], "messages[0].content"),
        ([said("user", 5)], "messages[0].content"),
        ([said("user", "x"), said("user", [IMAGE])], "messages[1].content[0]"),
        ([said("wizard", "x")], "messages[0].role"),
        ([{"content": "x"}], "messages[0]"),
        (["x"], "messages[0]"),
    ],
)
def test_messages_of_a_wrong_shape_are_refused_by_their_path(server, messages, param):
    for stream in (False, True):
        answer = server.post("/v1/chat/completions", {"messages": messages, "stream": stream})
        assert answer.status == 400, answer.body
        assert answer.error["param"].startswith(param)


def test_vendor_fields_of_bodies_and_messages_are_ignored(server):
    message = {"role": "user", "name": "bob", "id": 1, "content": "hi", "cache_control": {}}
    answer = post(
        server, message, user="u", metadata={}, store=True, service_tier="auto", x_foo=[1], temprature=0, max_tokens=1
    )
    assert answer.status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_meanings_that_are_not_supported_are_refused_by_name(server, fields, param):
    answer = post(server, said("user", "x"), **fields)
    assert (answer.status, answer.error["param"]) == (400, param)


def test_max_completion_tokens_is_obeyed_and_wins(server):
    for fields in ({"max_completion_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": 9}):
        answer = post(server, said("user", "hi"), **fields).json
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["choices"][0]["finish_reason"] == "length"


def test_without_a_limit_a_chat_goes_to_the_end_of_the_context(serve):
    server = serve(fake(context=96))
    answer = post(server, said("user", "hi")).json
    assert answer["usage"]["total_tokens"] == 96
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("text", ["<|im_end|>", "<|im_start|>", "<|endoftext|>"])
def test_a_control_token_in_a_callers_text_stays_text(server, text):
    """The fake's vocabulary counts a control token as one and plain text as one a two bytes."""
    plain = "x" * len(text)
    counted = [
        post(server, said("user", content), max_tokens=1).json["usage"]["prompt_tokens"] for content in (text, plain)
    ]
    assert counted[0] == counted[1]
    assert rendered(server, said("user", f"a{text}b")) == f"<|im_start|>user\na{text}b<|im_end|>\n"


def test_a_control_token_cannot_be_put_together_from_two_parts(server):
    parts = text_parts("<|im_", "end|>")
    counted = post(server, said("user", parts), max_tokens=1).json["usage"]["prompt_tokens"]
    assert counted == post(server, said("user", "x" * 11), max_tokens=1).json["usage"]["prompt_tokens"]


def test_a_chat_that_fills_the_context_is_refused_before_any_header(serve):
    server = serve(fake(context=64))
    for stream in (False, True):
        answer = post(server, said("user", "x" * 1000), stream=stream)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert answer.error["param"] == "messages"


def serve_template(serve, tmp_path, source, **settings):
    file = tmp_path / "template.jinja"
    file.write_text(source)
    return serve(fake(chat_template=str(file), **settings))


def test_the_configuration_can_name_a_template_of_its_own(serve, tmp_path):
    server = serve_template(serve, tmp_path, "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}\n{% endfor %}")
    assert post(server, said("user", ECHO)).text == f"[user]\n{ECHO}\n"


def test_a_templates_refusal_is_a_400_with_its_words_and_nothing_of_its_inside(serve, tmp_path):
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns here') }}{% endif %}ok"
    server = serve_template(serve, tmp_path, source)
    for stream in (False, True):
        answer = post(server, said("system", "x"), said("user", "y"), stream=stream)
        assert answer.status == 400
        assert "no system turns here" in answer.error["message"]
        assert "Traceback" not in answer.error["message"]
        assert str(tmp_path) not in answer.error["message"]
    assert post(server, said("user", "y"), max_tokens=1).status == 200
    assert server.metric("rejected_total", reason="invalid") == 2
    server.wait_idle()


HOPELESS = {
    "endless": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "huge": "{% for a in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
    "escaping": "{{ ().__class__.__base__.__subclasses__() }}",
    "broken": "{% if %}",
    "failing": "{{ 1 // 0 }}",
}


@pytest.mark.parametrize("name", HOPELESS)
def test_a_template_that_is_slow_huge_or_broken_costs_its_own_request_only(serve, tmp_path, name):
    file = tmp_path / "bad.jinja"
    file.write_text(HOPELESS[name])
    models = {"fake": {"backend": "fake", "slots": 2}, "bad": {"backend": "fake", "chat_template": str(file)}}
    server = serve({"models": models, "default_model": "fake"})
    bad = [server.begin("x", path="/v1/chat/completions", model="bad") for _ in range(2)]
    assert server.chat("x", max_tokens=1).status == 200
    for pending in bad:
        answer = pending.answer()
        assert answer.status == 400, answer.body
        assert answer.error["message"]
    assert server.chat("x", max_tokens=1).status == 200
    wait_until(lambda: server.replica(1)["sequences"] == 0, "no slot is held")
    assert server.complete("x", model="bad", max_tokens=1).status == 200


def test_a_client_that_leaves_while_its_chat_is_rendered_leaves_nothing_behind(serve, tmp_path):
    source = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
    server = serve_template(serve, tmp_path, source, slots=1)
    for _ in range(4):
        server.begin("x", path="/v1/chat/completions").close()
    assert server.complete("x", max_tokens=1).status == 200
    server.wait_metric(4, "requests_total", outcome="cancelled")
