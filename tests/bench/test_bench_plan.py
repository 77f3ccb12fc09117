"""A plan that makes no sense is refused by the name of its option; prompts are alike only where that was asked for."""

from __future__ import annotations

import itertools
import json

import pytest

from slimproc.bench.asks import Asks, arrivals
from slimproc.bench.failures import BadPlan
from slimproc.bench.plan import Plan
from slimproc.bench.target import Target


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"streams": 0}, "--streams"),
        ({"streams": 1_000_000}, "--streams"),
        ({"rate": 0.0}, "--rate"),
        ({"rate": float("inf")}, "--rate"),
        ({"rate": float("nan")}, "--rate"),
        ({"duration": -1.0}, "--duration"),
        ({"requests": 0}, "--requests"),
        ({"max_tokens": 0}, "--max-tokens"),
        ({"prompt_words": -1}, "--prompt-words"),
        ({"cancel": 1.5}, "--cancel"),
        ({"cancel": float("nan")}, "--cancel"),
        ({"cancel": 0.5, "stream": False}, "--cancel"),
        ({"slo_ttft": 0.1, "stream": False}, "--slo-ttft"),
        ({"slo_itl": 0.1, "stream": False}, "--slo-itl"),
        ({"prefixes": 2}, "--prefixes"),
        ({"timeout": 0.0}, "--timeout"),
        ({"warmup": -1}, "--warmup"),
    ],
)
def test_a_plan_that_makes_no_sense_names_its_option_in_one_line(wrong, named):
    with pytest.raises(BadPlan) as raised:
        Plan(**wrong)
    assert str(raised.value).startswith(named)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "ftp://x",
        "http://",
        "http://x:99999",
        "http://x:0",
        "http://[::1",
        "http://x/?a=b",
        "http://x/#y",
        "http://u:p@x",
        "http://x/a b",
        "http://x/\r\nX: y",
        "http://\u00fc",
    ],
)
def test_what_is_no_url_of_a_server_is_refused(url):
    with pytest.raises(BadPlan):
        Target.parse(url)


@pytest.mark.parametrize("key", ["", "a b", "a\r\nX: y", "\u00fc"])
def test_a_key_that_does_not_fit_into_a_header_is_refused(key):
    with pytest.raises(BadPlan):
        Target.parse("http://x", key)


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("http://x", b"POST /v1/completions HTTP/1.1\r\nHost: x:80\r\n"),
        ("http://x:8000/v1/", b"POST /v1/completions HTTP/1.1\r\nHost: x:8000\r\n"),
        ("https://x/api/v1", b"POST /api/v1/completions HTTP/1.1\r\nHost: x:443\r\n"),
        ("http://[::1]:8000", b"POST /v1/completions HTTP/1.1\r\nHost: [::1]:8000\r\n"),
    ],
)
def test_a_base_url_may_be_given_with_and_without_v1(url, line):
    assert Target.parse(url).post("/v1/completions", b"{}").startswith(line)


def test_a_key_is_sent_as_a_bearer_token():
    assert b"\r\nAuthorization: Bearer k\r\n" in Target.parse("http://x", "k").post("/v1/completions", b"{}")


def bodies(salt: str = "s", count: int = 20, model: str | None = "m", **plan) -> list[dict]:
    asks = Asks(Plan(**plan), model=model, salt=salt)
    return [json.loads(asks.ask(number).body) for number in range(count)]


def prompts(**plan) -> list[str]:
    return [body["prompt"] for body in bodies(chat=False, **plan)]


def test_no_prompt_begins_as_another_does_neither_in_this_run_nor_in_the_next():
    """The first word of each is its own."""
    found = prompts() + prompts(salt="t")
    assert len({prompt.split()[0] for prompt in found}) == len(found) == 40


def test_shared_beginnings_are_as_many_and_as_long_as_was_asked_for():
    found = prompts(shared_prefix=10, prefixes=3, count=200)
    beginnings = {tuple(prompt.split()[1:11]) for prompt in found}
    assert len(beginnings) == 3
    assert len(set(found)) == 200
    assert not beginnings & {tuple(prompt.split()[1:11]) for prompt in prompts(shared_prefix=10, prefixes=3, seed=1)}


def test_a_prompt_has_as_many_words_of_its_own_as_was_asked_for():
    assert {len(prompt.split()) for prompt in prompts(prompt_words=30)} == {31}
    assert {len(prompt.split()) for prompt in prompts(prompt_words=0)} == {1}


def test_the_same_seed_asks_the_same_and_another_does_not():
    assert bodies(cancel=0.5) == bodies(cancel=0.5)
    assert bodies(seed=1) != bodies(seed=2)
    assert list(itertools.islice(arrivals(5, 3), 9)) == list(itertools.islice(arrivals(5, 3), 9))
    assert next(arrivals(5, 3)) != next(arrivals(5, 4))


def test_a_body_has_what_the_plan_says_and_further_fields_last():
    (chat,) = bodies(count=1, max_tokens=9, fields={"temperature": 0, "max_tokens": 4})
    assert chat["model"] == "m"
    assert (chat["max_tokens"], chat["temperature"], chat["stream"]) == (4, 0, True)
    assert chat["stream_options"] == {"include_usage": True}
    assert [message["role"] for message in chat["messages"]] == ["user"]
    assert not {"model", "stream_options"} & set(bodies(count=1, model=None, usage=False)[0])


def test_about_the_wanted_share_leaves_in_mid_stream_and_never_after_the_end():
    asks = Asks(Plan(cancel=0.3, max_tokens=8), model=None, salt="s")
    leaving = [asks.ask(number).leave_after for number in range(1000)]
    told = [after for after in leaving if after is not None]
    assert 240 < len(told) < 360
    assert set(told) == set(range(1, 8))


def test_arrivals_are_a_poisson_process_of_the_wanted_rate():
    """The mean and the spread of the gaps of an exponential distribution are the same."""
    times = list(itertools.islice(arrivals(50, 0), 20_000))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 50, rel=0.03)
    assert spread == pytest.approx(mean, rel=0.03)


@pytest.mark.parametrize(
    ("plan", "limit"),
    [({}, 64), ({"streams": 3}, 24), ({"rate": 2.0}, 20), ({"duration": 5.0}, None), ({"requests": 7, "rate": 1.0}, 7)],
)
def test_a_plan_without_an_amount_has_a_modest_one(plan, limit):
    assert Plan(**plan).limit == limit
