"""``POST /v1/completions`` from end to end: what comes back, token by token and count by count."""

from __future__ import annotations

import pytest

from tests.serving import ServerProcess, script, wait_until

TOKENS = [" tok0", " tok1", " tok2", " tok3"]


def joined_and_streamed(server: ServerProcess, prompt, **fields):
    """(text, finish reason) of both modes."""
    answer = server.complete(prompt, **fields)
    assert answer.status == 200, answer.body
    with server.stream(prompt, **fields) as reader:
        events = list(reader.events())
    assert events.pop() == "[DONE]"
    choices = [event["choices"][0] for event in events if event["choices"]]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert len(reasons) == 1, "one finish reason, in the last chunk"
    assert choices[-1]["finish_reason"] == reasons[0]
    return (answer.text, answer.json["choices"][0]["finish_reason"]), ("".join(c["text"] for c in choices), reasons[0])


def test_an_answer_has_openais_shape(server):
    answer = server.complete("abcd", max_tokens=3)
    body = answer.json
    assert answer.headers["Content-Type"] == "application/json"
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "text_completion",
        "model": "fake",
        "choices": [{"index": 0, "text": " tok0 tok1 tok2", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 16),
        ({"max_tokens": None}, 16),
        ({"max_tokens": 0}, 0),
        ({"max_tokens": 1}, 1),
        ({"max_tokens": 2.0}, 2),
        ({"max_tokens": 17, "seed": 5, "temperature": 0, "top_p": 0.5}, 17),
    ],
)
def test_max_tokens_is_exact_and_sixteen_when_nothing_is_asked_for(server, fields, tokens):
    answer = server.complete("hi", **fields).json
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["text"].count("tok") == answer["usage"]["completion_tokens"] == tokens


@pytest.mark.parametrize("max_tokens", [-1, 2.5, "5", True, []])
def test_a_max_tokens_that_is_no_count_is_refused(server, max_tokens):
    for stream in (False, True):
        answer = server.complete("hi", max_tokens=max_tokens, stream=stream)
        assert (answer.status, answer.error["param"]) == (400, "max_tokens")


def test_a_huge_max_tokens_means_to_the_end_of_the_context(short):
    for max_tokens in (63, 10**18, 1e18):
        answer = short.complete("ab" * 14, max_tokens=max_tokens).json
        assert answer["usage"]["prompt_tokens"] == 14
        assert answer["usage"]["total_tokens"] == 64
        assert answer["choices"][0]["finish_reason"] == "length"


def test_every_slot_has_the_whole_context_and_none_suffers_from_anothers_end(short):
    assert short.get("/v1/models/fake").json["context_length"] == 64
    slow = script(token_latency=0.01)
    prompts = [slow] * 3 + [script(tokens=["x"], token_latency=0.01)]
    pending = [short.begin(prompt, max_tokens=1000) for prompt in prompts]
    answers = [one.answer().json for one in pending]
    for answer in answers[:3]:
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == 64
    assert (answers[3]["choices"][0]["text"], answers[3]["choices"][0]["finish_reason"]) == ("x", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_fills_the_context_is_refused_before_any_header(short, stream):
    refused = short.metric("rejected_total", model="fake", reason="invalid")
    answer = short.complete("x" * 1000, stream=stream)
    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"
    assert "500" in answer.error["message"]
    assert "64" in answer.error["message"]
    assert answer.error["param"] == "prompt"
    short.wait_metric(refused + 1, "rejected_total", model="fake", reason="invalid")
    assert short.complete("hi", max_tokens=1).status == 200


def test_a_list_of_prompts_gives_choices_in_its_order(server):
    answer = server.complete([script(tokens=[letter]) for letter in "abc"]).json
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "a"), (1, "b"), (2, "c")]
    assert answer["usage"]["completion_tokens"] == 3


def test_more_sequences_than_slots_take_their_turns(server):
    """The server has four slots."""
    answer = server.complete([script(tokens=[str(number)]) for number in range(40)], n=3)
    assert [choice["text"] for choice in answer.json["choices"]] == [str(i // 3) for i in range(120)]


def test_token_ids_are_taken_as_they_are(server):
    ids = server.post("/tokenize", {"content": "hello!"}).json["tokens"]
    for prompt, counted in ((ids, 3), ([ids, ids[:1]], 4), ([1, 2, 3], 3)):
        answer = server.complete(prompt, max_tokens=1, echo=True).json
        assert answer["usage"]["prompt_tokens"] == counted
    assert server.complete([ids], max_tokens=1, echo=True).text == "hello! tok0"


@pytest.mark.parametrize(
    "prompt",
    [None, {}, [], ["a", 1], [1, "a"], [[1], "a"], [[]], 5, True, [1.5], [-1], [10**9], [[1], [10**9]], [None]],
)
def test_a_prompt_of_no_known_form_or_with_unknown_ids_is_refused_whole(server, prompt):
    for stream in (False, True):
        answer = server.complete(prompt, stream=stream)
        assert (answer.status, answer.error["param"].split("[")[0]) == (400, "prompt"), answer.body
    wait_until(lambda: not server.replica()["sequences"], "nothing of it runs")


def test_a_thousand_prompts_are_refused_and_not_half_run(server):
    before = server.replica()["tokens"]
    answer = server.complete(["x"] * 1000)
    assert (answer.status, answer.error["param"]) == (400, "prompt")
    assert server.replica()["tokens"] == before


def test_n_gives_as_many_choices_and_counts_the_prompt_once(server):
    answer = server.complete("abcd", n=2, max_tokens=3).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["text"] for choice in answer["choices"]] == [" tok0 tok1 tok2"] * 2
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (2, 6)


def test_echo_puts_the_prompt_before_the_answer(server):
    assert joined_and_streamed(server, "say: ", max_tokens=1, echo=True) == (("say:  tok0", "length"),) * 2
    assert joined_and_streamed(server, "say: ", max_tokens=0, echo=True) == (("say: ", "length"),) * 2
    assert joined_and_streamed(server, "say: ", max_tokens=0) == (("", "length"),) * 2


def test_a_raw_prompts_control_tokens_are_control_tokens(server):
    assert server.complete("<|im_start|>", max_tokens=1).json["usage"]["prompt_tokens"] == 1


@pytest.mark.parametrize(
    ("tokens", "stop", "text", "reason"),
    [
        (["ABC", "DEF", "G", "HI", "J", "K"], "DEFGHIJ", "ABC", "stop"),
        (["Par", "is."], ["Pari"], "", "stop"),
        (["Par", "is."], ["s.", "is"], "Par", "stop"),
        (["Par", "is."], ["is", "s."], "Par", "stop"),
        (["x", "yz"], [], "xyz", "stop"),
        (["x", "yz"], None, "xyz", "stop"),
        (["END", "more"], "END", "", "stop"),
        (["a", "EN", "X"], "END", "aENX", "stop"),
        (["a", "EN"], ["END", "E1", "E2", "E3", "E4"], "aEN", "stop"),
        (["ü", {"hex": "c3"}, {"hex": "a4"}, "x"], "äx", "ü", "stop"),
    ],
)
def test_a_stop_string_cuts_at_its_earliest_match_and_none_of_it_leaks(server, tokens, stop, text, reason):
    assert joined_and_streamed(server, script(tokens=tokens), stop=stop) == ((text, reason),) * 2


@pytest.mark.parametrize("stop", ["", [""], ["x"] * 17, 5, [5], {}])
def test_stop_strings_that_are_empty_too_many_or_no_strings_are_refused(server, stop):
    answer = server.complete("hi", stop=stop)
    assert (answer.status, answer.error["param"].split("[")[0]) == (400, "stop")


@pytest.mark.parametrize(
    ("tokens", "limit", "text"),
    [
        ([{"hex": "f09f"}, {"hex": "9880"}, "!"], 3, "😀!"),
        (["a", {"hex": "f09f"}, {"hex": "9880"}], 2, "a"),
        (["a", {"hex": "ff"}, "b"], 3, "a\N{REPLACEMENT CHARACTER}b"),
        (["\u2028", '"\\', "\x00", "</script>"], 4, '\u2028"\\\x00</script>'),
    ],
)
def test_characters_over_token_borders_are_whole_in_both_modes(server, tokens, limit, text):
    joined, streamed = joined_and_streamed(server, script(tokens=tokens), max_tokens=limit)
    assert joined[0] == streamed[0] == text


def test_fields_that_nobody_knows_are_ignored_and_known_ones_are_checked(server):
    ok = server.complete("hi", user="me", metadata={"a": "b"}, store=True, service_tier="x", temprature=0, max_tokens=1)
    assert ok.status == 200
    for field, wrong in {"temperature": "warm", "top_p": 2, "seed": "x", "n": 0, "stream": "yes", "echo": 1}.items():
        answer = server.complete("hi", **{field: wrong})
        assert (answer.status, answer.error["param"]) == (400, field)


@pytest.mark.parametrize("field", [{"logprobs": 6}, {"suffix": "x"}, {"best_of": 3}])
def test_what_is_not_supported_is_refused_by_name(server, field):
    answer = server.complete("hi", **field)
    assert (answer.status, answer.error["param"]) == (400, next(iter(field)))


def test_an_endless_model_ends_at_the_context_also_with_its_end_suppressed(short):
    answer = short.complete(script(tokens=["x"]), ignore_eos=True, max_tokens=500).json
    assert answer["usage"]["total_tokens"] == 64
    assert answer["choices"][0]["finish_reason"] == "length"


def test_max_tokens_limit_refuses_more_and_bounds_the_default(short):
    answer = short.complete("hi", model="limited", max_tokens=9)
    assert (answer.status, answer.error["param"]) == (400, "max_tokens")
    assert short.complete("hi", model="limited").json["usage"]["completion_tokens"] == 8
    assert short.chat("hi", model="limited").json["usage"]["completion_tokens"] == 8


def test_a_hundred_requests_one_after_another_on_one_connection(server):
    connection = server.connect()
    try:
        for _ in range(100):
            connection.request("POST", "/v1/completions", b'{"prompt":"hi","max_tokens":2}')
            assert connection.getresponse().read().count(b" tok") == 2
    finally:
        connection.close()


def test_tokenize_and_detokenize_are_each_others_opposite(server):
    tokens = server.post("/tokenize", {"content": "grüß <|im_end|>", "model": "alias"}).json
    assert tokens["count"] == len(tokens["tokens"])
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json["content"] == "grüß <|im_end|>"
    refused = server.post("/detokenize", {"tokens": [10**8]})
    assert (refused.status, refused.error["param"]) == (400, "tokens")
