"""Closed and open loops against a server that behaves as scripted: who is asked when, and what each request came to."""

from __future__ import annotations

import asyncio

import pytest

from slimproc.bench import drive as module
from slimproc.bench.asks import Asks
from slimproc.bench.drive import Drive
from slimproc.bench.plan import Plan
from slimproc.bench.target import Target
from tests.bench.conftest import END, LIMIT, Client, Scripted, chunk, drive, event, head, said, usage

STALL = 0.3


async def two_tokens(client: Client, _body: dict) -> None:
    await client.stream(said("a"), said("b"), said("", "stop"), usage(2))


async def whole(client: Client, _body: dict) -> None:
    await client.whole({"choices": [{"text": "ab"}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})


def outcomes(one: Drive) -> set[tuple[str, str]]:
    return {(sample.outcome, sample.kind) for sample in one.samples}


def test_a_closed_loop_asks_as_many_as_it_was_told_with_so_many_at_a_time():
    one, scripted = drive(two_tokens, streams=4, requests=40)
    assert outcomes(one) == {("ok", "")}
    assert sorted(sample.number for sample in one.samples) == list(range(40))
    assert scripted.most <= 4
    assert len({body["prompt"] for body in scripted.requests}) == 40
    assert {sample.tokens for sample in one.samples} == {2}


def test_a_connection_is_kept_between_the_requests_of_a_stream():
    made = []

    async def note(client: Client, body: dict) -> None:
        made.append(client._writer)
        await two_tokens(client, body)

    drive(note, streams=1, requests=10)
    assert len(set(map(id, made))) == 1


def test_an_answer_that_is_not_streamed_has_latency_and_usage_but_no_first_token():
    one, scripted = drive(whole, stream=False)
    (sample,) = one.samples
    assert scripted.requests[0]["stream"] is False
    assert (sample.outcome, sample.tokens, sample.prompt_tokens, sample.ttft) == ("ok", 2, 3, None)


def test_warm_up_requests_are_asked_and_not_counted():
    one, scripted = drive(two_tokens, requests=5, warmup=3)
    assert (len(scripted.requests), len(one.samples)) == (8, 5)


def test_an_open_loop_goes_on_asking_while_a_server_answers_nobody():
    """All requests are there before the first is answered: the arrivals do not wait for the server."""
    all_came = asyncio.Event()

    async def hold(client: Client, body: dict) -> None:
        if client.number == 29:
            all_came.set()
        await all_came.wait()
        await two_tokens(client, body)

    one, scripted = drive(hold, rate=1000.0, requests=30)
    assert scripted.most == 30
    assert outcomes(one) == {("ok", "")}


def test_a_servers_pause_is_in_the_times_of_all_requests_that_were_due_in_it():
    """A generator that waited would have seen one slow request. This is coordinated omission, and there is none."""
    paused = asyncio.Event()

    async def pause(client: Client, body: dict) -> None:
        if client.number == 0:
            await asyncio.sleep(STALL)
            paused.set()
        await paused.wait()
        await two_tokens(client, body)

    one, _ = drive(pause, rate=500.0, requests=50)

    begun = [sample for sample in one.samples if sample.start < STALL / 2]
    assert len(begun) > 1
    assert all(sample.latency >= STALL - sample.start - 0.001 for sample in one.samples)
    assert all(sample.ttft >= STALL - sample.start - 0.001 for sample in one.samples)


def test_a_blocked_client_counts_its_own_lateness_too(monkeypatch):
    """Times run from when a request was due, not from when this process got round to it."""
    block = asyncio.sleep

    async def work() -> Drive:
        scripted = Scripted(two_tokens)
        server = await scripted.start()
        plan = Plan(chat=False, rate=1000.0, requests=20)
        one = Drive(Target.parse(scripted.url), plan, Asks(plan, model="m", salt="s"))
        running = asyncio.ensure_future(one.run())
        while not one.running:
            await block(0)
        module_time = module.perf_counter()
        while module.perf_counter() - module_time < STALL:
            pass
        await running
        server.close()
        return one

    one = asyncio.run(work())
    assert max(sample.late for sample in one.samples) > STALL / 2
    assert all(sample.latency >= sample.ttft >= sample.late for sample in one.samples)


def test_arrivals_begin_when_they_are_due_and_not_before():
    one, _ = drive(two_tokens, rate=200.0, requests=20, seed=3)
    due = [at for at, _ in zip(module.arrivals(200.0, 3), range(20), strict=False)]
    begun = [sample.start for sample in sorted(one.samples, key=lambda sample: sample.number)]
    assert all(-0.001 < at - start <= 0.001 for at, start in zip(due, begun, strict=True))


def test_a_client_that_is_behind_still_lets_its_requests_run(monkeypatch):
    came, seen = [], []

    def all_at_once(_rate: float, _seed: int):
        for _ in range(300):
            seen.append(len(came))
            yield 0.0

    async def count(client: Client, body: dict) -> None:
        came.append(1)
        await two_tokens(client, body)

    monkeypatch.setattr(module, "arrivals", all_at_once)
    one, _ = drive(count, rate=100.0, requests=300)
    assert outcomes(one) == {("ok", "")}
    assert seen[-1] > 0


def test_no_request_begins_after_the_duration():
    for plan in ({"duration": 0.2, "streams": 2}, {"duration": 0.2, "rate": 100.0}):
        one, _ = drive(two_tokens, **{"requests": None} | plan)
        assert one.samples
        assert all(sample.start < 0.2 for sample in one.samples)


def test_a_client_that_leaves_takes_its_connection_with_it_and_the_next_request_is_fine():
    async def endless(client: Client, _body: dict) -> None:
        await client.send(head())
        while True:
            await client.send(chunk(event(said("x"))))
            await asyncio.sleep(0.001)

    one, scripted = drive(endless, cancel=1.0, requests=6, streams=2, max_tokens=5)
    assert outcomes(one) == {("cancelled", "")}
    assert all(sample.tokens >= 1 for sample in one.samples)
    assert len(scripted.requests) == 6


@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Service Unavailable", "529 Overloaded"])
def test_a_refusal_is_no_error_and_has_its_latency(sample, status):
    async def refuse(client: Client, _body: dict) -> None:
        await client.whole({"error": {"message": "full"}}, status, "Retry-After: 1\r\n")

    found = sample(refuse)
    assert (found.outcome, found.status, found.detail) == ("refused", int(status[:3]), "full")
    assert found.latency > 0


@pytest.mark.parametrize(
    ("status", "body", "said_"),
    [
        ("404 Not Found", {"error": {"message": "no\nsuch model"}}, "no such model"),
        ("400 Bad Request", {"error": "bad"}, "bad"),
        ("500 Oops", {"no": "error"}, "no"),
    ],
)
def test_another_status_is_an_error_of_that_kind_with_what_the_server_says(sample, status, body, said_):
    async def fail(client: Client, _body: dict) -> None:
        await client.whole(body, status)

    found = sample(fail)
    assert (found.outcome, found.kind) == ("error", f"HTTP {status[:3]}")
    assert said_ in found.detail
    assert "\n" not in found.detail


def test_an_answer_that_is_not_sse_where_a_stream_was_asked_for_is_an_error(sample):
    assert sample(whole).kind == "not SSE"


def test_a_request_that_outlives_its_time_is_an_error_and_the_next_one_is_asked():
    async def silent(client: Client, body: dict) -> None:
        if client.number == 0:
            await asyncio.sleep(LIMIT)
        await two_tokens(client, body)

    one, _ = drive(silent, requests=2, timeout=0.3)
    assert [(sample.outcome, sample.kind) for sample in one.samples] == [("error", "timeout"), ("ok", "")]


def test_a_server_that_closes_after_each_answer_costs_connections_and_no_errors():
    async def once(client: Client, body: dict) -> None:
        await two_tokens(client, body)
        client.close()

    one, _ = drive(once, requests=12, streams=3)
    assert outcomes(one) == {("ok", "")}


def test_an_answer_that_breaks_off_is_an_error_and_says_after_how_many_events(sample):
    async def cut(client: Client, _body: dict) -> None:
        await client.send(head(), chunk(event(said("a"))))
        client.close()

    found = sample(cut)
    assert (found.outcome, found.kind) == ("error", "cut off")
    assert "1 events" in found.detail


def test_a_server_that_goes_away_ends_the_run_and_what_was_measured_stays(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.2)

    async def work() -> Drive:
        scripted = Scripted(two_tokens)
        server = await scripted.start()

        async def last(client: Client, body: dict) -> None:
            await two_tokens(client, body)
            if len(scripted.requests) >= 10:
                server.close()
                client.close()

        scripted.handler = last
        plan = Plan(chat=False, duration=LIMIT * 10, streams=1)
        one = Drive(Target.parse(scripted.url), plan, Asks(plan, model="m", salt="s"))
        async with asyncio.timeout(LIMIT):
            await one.run()
        return one

    one = asyncio.run(work())
    assert "refused" in one.gone
    assert [sample.outcome for sample in one.samples[:10]] == ["ok"] * 10
    assert {sample.kind for sample in one.samples[10:]} == {"connect"}


@pytest.mark.parametrize("plan", [{"streams": 2}, {"rate": 100.0}, {"streams": 2, "warmup": 100_000}])
def test_a_run_that_is_stopped_returns_with_what_was_measured(plan):
    async def work() -> Drive:
        five = asyncio.Event()

        async def count(client: Client, body: dict) -> None:
            await two_tokens(client, body)
            if client.number == 5:
                five.set()

        scripted = Scripted(count)
        server = await scripted.start()
        made = Plan(chat=False, duration=LIMIT * 10, **plan)
        one = Drive(Target.parse(scripted.url), made, Asks(made, model="m", salt="s"))
        running = asyncio.ensure_future(one.run())
        await five.wait()
        one.stop()
        async with asyncio.timeout(LIMIT):
            await running
        server.close()
        return one

    one = asyncio.run(work())
    assert one.stopped
    assert one.ended >= one.began
    assert bool(one.samples) is ("warmup" not in plan)


def test_a_cancelled_run_is_cancelled():
    async def work() -> None:
        scripted = Scripted(two_tokens)
        server = await scripted.start()
        plan = Plan(chat=False, duration=LIMIT * 10)
        running = asyncio.ensure_future(Drive(Target.parse(scripted.url), plan, Asks(plan, model="m", salt="s")).run())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        server.close()

    asyncio.run(work())


def test_progress_counts_requests_or_seconds():
    one, _ = drive(two_tokens, requests=3)
    assert one.progress() == (3, 3)
    plan = Plan(duration=5.0)
    assert Drive(Target.parse("http://x"), plan, Asks(plan, model=None, salt="")).progress() == (0.0, 5.0)


def test_the_end_mark_of_a_stream_is_not_part_of_what_is_counted():
    async def plain(client: Client, _body: dict) -> None:
        await client.send(head(), chunk(event(said("a"))), chunk(event(said("b", "length"))), END)

    (found,) = drive(plain)[0].samples
    assert (found.outcome, found.tokens, found.tokens_by) == ("ok", 2, "events")
