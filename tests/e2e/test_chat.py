"""``POST /v1/chat/completions`` with the model's template and with the configuration's."""

from __future__ import annotations

import pytest

from tests.serving import ServerProcess, fake, script

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


def test_without_a_limit_a_chat_goes_to_the_end_of_the_context(short):
    answer = post(short, said("user", "hi")).json
    assert answer["usage"]["total_tokens"] == 64
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


def test_a_chat_that_fills_the_context_is_refused_before_any_header(short):
    for stream in (False, True):
        answer = post(short, said("user", "x" * 1000), stream=stream)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert answer.error["param"] == "messages"


HOPELESS = {
    "endless": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "huge": "{% for a in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
    "escaping": "{{ ().__class__.__base__.__subclasses__() }}",
    "broken": "{% if %}",
    "failing": "{{ 1 // 0 }}",
}
GOOD = {
    "bracketed": "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}\n{% endfor %}",
    "marked": "\ufeff{{ messages[0].content }}",
    "refusing": "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns here') }}{% endif %}ok",
}


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    """A model for each of these templates, which has its name, and one with its own."""
    directory = tmp_path_factory.mktemp("templates")
    models = {"fake": {"backend": "fake", "slots": 2}}
    for name, source in (HOPELESS | GOOD).items():
        file = directory / f"{name}.jinja"
        file.write_text(source)
        models[name] = {"backend": "fake", "chat_template": str(file)}
    with ServerProcess(directory, {"models": models, "default_model": "fake"}) as process:
        yield process.wait_ready()


def test_the_configuration_can_name_a_template_of_its_own(templates):
    assert post(templates, said("user", ECHO), model="bracketed").text == f"[user]\n{ECHO}\n"


def test_a_byte_order_mark_is_no_part_of_a_template(templates):
    assert post(templates, said("user", ECHO), model="marked").text == ECHO


def test_a_templates_refusal_is_a_400_with_its_words_and_nothing_of_its_inside(templates):
    for stream in (False, True):
        answer = post(templates, said("system", "x"), said("user", "y"), model="refusing", stream=stream)
        assert answer.status == 400
        assert "no system turns here" in answer.error["message"]
        assert "Traceback" not in answer.error["message"]
        assert str(templates.log_path.parent) not in answer.error["message"]
    assert post(templates, said("user", "y"), model="refusing", max_tokens=1).status == 200
    assert templates.metric("rejected_total", model="refusing", reason="invalid") == 2
    templates.wait_idle()


@pytest.mark.parametrize("name", HOPELESS)
def test_a_template_that_is_slow_huge_or_broken_costs_its_own_request_only(templates, name):
    bad = [templates.begin("x", path="/v1/chat/completions", model=name) for _ in range(2)]
    assert templates.chat("x", max_tokens=1).status == 200
    for pending in bad:
        answer = pending.answer()
        assert answer.status == 400, answer.body
        assert answer.error["message"]
    assert templates.chat("x", max_tokens=1).status == 200
    templates.wait_idle()
    assert templates.complete("x", model=name, max_tokens=1).status == 200


def test_a_client_that_leaves_while_its_chat_is_rendered_leaves_nothing_behind(serve, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text(HOPELESS["endless"])
    server = serve(fake(chat_template=str(file), slots=1))
    for _ in range(4):
        server.begin("x", path="/v1/chat/completions").close()
    assert server.complete("x", max_tokens=1).status == 200
    server.wait_metric(4, "requests_total", outcome="cancelled")
