"""What samples come to: rates, quantiles, goodput, and two servers held against each other."""

from __future__ import annotations

import csv
import io
import json
import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimproc.bench import rows
from slimproc.bench.plan import Plan
from slimproc.bench.quantiles import quantile, weighted_quantile
from slimproc.bench.sample import Sample
from slimproc.bench.summary import summarize
from slimproc.bench.versus import compare, order


def ok(number: int = 0, **values) -> Sample:
    defaults = {"start": 0.0, "outcome": "ok", "status": 200, "ttft": 0.1, "latency": 1.0, "tokens": 10}
    return Sample(number=number, **defaults | {"tokens_by": "usage"} | values)


def summed(*samples: Sample, wall: float = 2.0, cpu: float = 0.001, **plan):
    return summarize(samples, Plan(**plan), wall=wall, cpu=cpu)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_the_least_value_that_so_many_do_not_exceed(values, share):
    ordered = sorted(values)
    found = quantile(ordered, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) < share * len(values)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=20), st.sampled_from([0.5, 0.9, 1.0]))
def test_a_weighted_quantile_is_that_of_the_values_written_out(pairs, share):
    pairs = sorted(pairs)
    written_out = [value for value, times in pairs for _ in range(times)]
    assert weighted_quantile(pairs, share) == quantile(written_out, share)


def test_rates_are_of_whole_answers_and_tokens_of_all_of_them():
    found = summed(ok(), ok(), Sample(number=2, start=0.0, outcome="cancelled", tokens=5), wall=2.0)
    assert (found.requests, found.ok, found.cancelled) == (3, 2, 1)
    assert (found.requests_per_s, found.tokens, found.tokens_per_s) == (1.0, 25, 12.5)


def test_times_are_of_answers_that_ended_ok_and_refusals_have_their_own():
    refused = [
        Sample(number=n, start=0.0, outcome="refused", status=503, kind="HTTP 503", latency=n / 1000)
        for n in range(1, 101)
    ]
    found = summed(ok(latency=3.0), *refused)
    assert (found.latency.count, found.latency.p50) == (1, 3.0)
    assert (found.refusal.count, found.refusal.p50, found.refusal.p99, found.refusal.max) == (100, 0.05, 0.099, 0.1)
    assert (found.refused, found.errors, found.kinds) == (100, 0, {"HTTP 503": 100})


def test_errors_are_counted_by_kind_with_the_first_example_of_each():
    failed = [Sample(number=n, start=0.0, kind=kind, detail=f"{n}") for n, kind in enumerate(["a", "b", "a"])]
    found = summed(*failed)
    assert (found.errors, found.kinds, found.examples) == (3, {"a": 2, "b": 1}, {"a": "0", "b": "1"})


@pytest.mark.parametrize(
    ("limits", "good"),
    [({}, None), ({"slo_ttft": 0.2}, 3), ({"slo_itl": 0.05}, 3), ({"slo_ttft": 0.2, "slo_itl": 0.05}, 2)],
)
def test_goodput_counts_answers_that_keep_every_stated_limit(limits, good):
    samples = [
        ok(itl_mean=0.01),
        ok(ttft=0.5, itl_mean=0.01),
        ok(itl_mean=0.5),
        ok(itl_mean=None, tokens=1),
        Sample(number=9, start=0.0, outcome="cancelled", ttft=0.01),
    ]
    found = summed(*samples, wall=2.0, **limits)
    assert found.good == good
    assert found.goodput == (None if good is None else good / 2)


def test_gaps_of_all_answers_are_pooled_with_nothing_between_tokens_that_came_together():
    first = ok(gaps=(array("d", [0.0, 0.2]), array("L", [1, 3])))
    second = ok(gaps=(array("d", [0.0, 0.1]), array("L", [2, 1])))
    found = summed(first, second).itl
    assert (found.count, found.p50, found.max) == (5, 0.0, 0.2)
    assert found.mean == pytest.approx(0.3 / 5)


def test_nothing_comes_to_nothing_and_not_to_an_exception():
    found = summed(wall=0.0)
    assert (found.requests, found.requests_per_s, found.ttft.p50, found.client_cpu_us_per_token) == (0, 0.0, None, None)


def test_the_clients_own_cost_is_told_per_token():
    assert summed(ok(tokens=1000), cpu=0.002).client_cpu_us_per_token == pytest.approx(2.0)


def test_who_counted_the_tokens_is_told():
    assert summed(ok()).tokens_by == "usage"
    assert summed(ok(), ok(tokens_by="events")).tokens_by == "both"


def comparison(measure: str, *pairs):
    return next(one for one in compare(pairs) if one.measure == measure)


def test_a_ratio_is_above_one_where_the_first_server_is_the_better_one():
    fast, slow = summed(ok(ttft=0.1), wall=1.0), summed(ok(ttft=0.3), wall=2.0)
    assert comparison("tokens/s", (fast, slow)).ratios == [2.0]
    assert comparison("time to first token p50", (fast, slow)).ratio == pytest.approx(3.0)
    assert comparison("tokens/s", (slow, fast)).ratio == 0.5


def test_a_ratio_counts_only_when_every_round_says_the_same():
    fast, slow = summed(ok(), wall=1.0), summed(ok(), wall=2.0)
    assert comparison("tokens/s", (fast, slow), (fast, slow)).clear
    assert not comparison("tokens/s", (fast, slow), (slow, fast)).clear
    assert comparison("tokens/s", (fast, slow), (fast, slow), (slow, fast)).ratio == 2.0


def test_what_one_side_has_not_measured_is_not_compared():
    mute = summed(ok(ttft=None))
    assert "time to first token p50" not in {one.measure for one in compare([(summed(ok()), mute)])}
    assert compare([]) == []


def test_two_servers_take_turns_in_going_first():
    assert [order(number)[0] for number in range(4)] == [0, 1, 0, 1]


def test_every_number_of_a_row_is_in_both_files():
    row = rows.row(ok(7, detail="x,\n", ttft=0.1234567), "http://x", 2)
    text = io.StringIO()
    rows.write_csv(text, [row])
    (read,) = csv.DictReader(io.StringIO(text.getvalue()))
    assert (read["server"], read["round"], read["number"], read["ttft"], read["detail"]) == (
        "http://x",
        "2",
        "7",
        "0.123457",
        "x,\n",
    )
    assert read["itl_p99"] == ""
    document = io.StringIO()
    rows.write_json(document, {"requests": [row]})
    assert json.loads(document.getvalue())["requests"][0] == row
    assert math.isclose(row["ttft"], 0.123457)


@pytest.mark.parametrize("words", ["=1+1", "+1", "-1", "@x"])
def test_a_servers_words_are_no_formula_in_a_spreadsheet(words):
    text = io.StringIO()
    rows.write_csv(text, [rows.row(ok(detail=words), "http://x", 0)])
    (read,) = csv.DictReader(io.StringIO(text.getvalue()))
    assert read["detail"] == f"'{words}"
