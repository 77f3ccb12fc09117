"""Metrics have fixed names and labels, all series from the start, and numbers that agree with what was counted."""

import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import slimproc
from slimproc import errors
from slimproc.http.exposition import Exposition
from slimproc.metrics import (
    FAMILIES,
    LOADS,
    OUTCOMES,
    PREFIX,
    REJECTIONS,
    RESTARTS,
    STATES,
    Histogram,
    Metrics,
    rejection,
)
from slimproc.replicas.states import ReplicaState

DOCUMENT = Path(__file__).parent.parent / "docs" / "metrics.md"


def samples(metrics):
    """Every sample of a scrape by (name, labels)."""
    found = {}
    for family in text_string_to_metric_families(Exposition(metrics).render().decode()):
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.items()))
            assert key not in found, "a series must not come twice"
            found[key] = sample.value
    return found


def value(metrics, name, **labels):
    return samples(metrics)[(PREFIX + name, *sorted(labels.items()))]


@pytest.fixture
def metrics():
    return Metrics(["small", "large"])


def test_all_series_exist_from_the_start_and_are_zero(metrics):
    found = samples(metrics)

    assert set(found.values()) == {0}
    for model in ("small", "large"):
        for label, values, name in (
            ("outcome", OUTCOMES, "requests_total"),
            ("reason", REJECTIONS, "rejected_total"),
            ("reason", RESTARTS, "engine_restarts_total"),
            ("outcome", LOADS, "model_loads_total"),
            ("state", STATES, "replicas"),
        ):
            for one in values:
                assert (PREFIX + name, *sorted({"model": model, label: one}.items())) in found
        for name in ("queue_depth", "inflight_requests", "prompt_tokens_total", "queue_wait_seconds_count"):
            assert (PREFIX + name, ("model", model)) in found
    assert (PREFIX + "rejected_total", ("model", ""), ("reason", "not_found")) in found
    assert (PREFIX + "event_loop_lag_seconds_count",) in found


def test_memory_is_told_by_device_and_kind_as_its_owner_names_them(metrics):
    metrics.gauge("memory_bytes", lambda: {("host", "free"): 3, ("GPU-1", "held"): 4})

    assert value(metrics, "memory_bytes", device="host", kind="free") == 3
    assert value(metrics, "memory_bytes", device="GPU-1", kind="held") == 4


def test_a_server_without_models_can_be_scraped():
    assert ("slimproc_event_loop_lag_seconds_sum",) in samples(Metrics([]))


def test_every_number_comes_out_under_its_name(metrics):
    small = metrics.model("small")
    numbers = {
        "prompt_tokens": ("prompt_tokens_total", 11),
        "cached_prompt_tokens": ("cached_prompt_tokens_total", 12),
        "generated_tokens": ("generated_tokens_total", 13),
        "ring_full": ("ring_full_total", 14),
        "evictions": ("evictions_total", 15),
    }
    for attribute, (_, number) in numbers.items():
        setattr(small, attribute, number)
    small.requests["timeout"] += 2
    small.rejected["overloaded"] += 3
    small.engine_restarts["stalled"] += 4
    small.loads["failed"] += 5
    histograms = {
        "queue_wait": "queue_wait_seconds",
        "ttft": "time_to_first_token_seconds",
        "inter_token": "inter_token_seconds",
        "decode_rate": "decode_tokens_per_second",
        "request_duration": "request_duration_seconds",
        "load_seconds": "model_load_seconds",
        "batch_size": "batch_size",
    }
    for number, attribute in enumerate(histograms, 1):
        getattr(small, attribute).observe(number)
    metrics.event_loop_lag.observe(0.5)

    for name, number in numbers.values():
        assert value(metrics, name, model="small") == number
    assert value(metrics, "requests_total", model="small", outcome="timeout") == 2
    assert value(metrics, "rejected_total", model="small", reason="overloaded") == 3
    assert value(metrics, "engine_restarts_total", model="small", reason="stalled") == 4
    assert value(metrics, "model_loads_total", model="small", outcome="failed") == 5
    for number, name in enumerate(histograms.values(), 1):
        assert value(metrics, f"{name}_sum", model="small") == number
        assert value(metrics, f"{name}_count", model="small") == 1
    assert value(metrics, "event_loop_lag_seconds_sum") == 0.5
    assert {found for key, found in samples(metrics).items() if ("model", "large") in key} == {0}


def test_every_counted_attribute_has_a_metric(metrics):
    declared = {family.attribute for family in FAMILIES if family.attribute}

    assert declared == set(type(metrics.model("small")).__slots__)


def test_gauges_are_read_from_their_owners_at_each_scrape(metrics):
    depth = {"small": 1}
    metrics.gauge("queue_depth", lambda: depth)
    metrics.gauge("replicas", lambda: {("large", "ready"): 2})

    assert value(metrics, "queue_depth", model="small") == 1
    depth["small"] = 5
    assert value(metrics, "queue_depth", model="small") == 5
    assert value(metrics, "queue_depth", model="large") == 0
    assert value(metrics, "replicas", model="large", state="ready") == 2
    assert value(metrics, "replicas", model="large", state="failed") == 0


def test_a_gauge_that_fails_is_left_out_and_costs_nothing_else(metrics, caplog):
    def fail():
        raise RuntimeError("a bug")

    metrics.gauge("queue_depth", fail)

    names = {key[0] for key in samples(metrics)}
    assert PREFIX + "queue_depth" not in names
    assert PREFIX + "replicas" in names
    assert "a gauge could not be read" in caplog.text


@pytest.mark.parametrize("name", ["queue_deep", "requests_total", "slimproc_queue_depth"])
def test_only_declared_gauges_have_owners(metrics, name):
    with pytest.raises(KeyError):
        metrics.gauge(name, dict)


HOSTILE = ["gpt-4", "x" * 10_000, 'a"} 1\nslimproc_forged 1', "small ", "", None]


def test_a_label_never_comes_from_a_request(metrics):
    before = samples(metrics).keys()

    for name in HOSTILE:
        metrics.reject(name, errors.ModelNotFound("no such model"))
    metrics.gauge("queue_depth", lambda: dict.fromkeys(HOSTILE, 1))
    metrics.gauge("replicas", lambda: {("small", "sleeping"): 1, ("gpt-4", "ready"): 1})

    assert samples(metrics).keys() == before
    assert value(metrics, "rejected_total", model="", reason="not_found") == len(HOSTILE)
    with pytest.raises(KeyError):
        metrics.model("gpt-4")
    with pytest.raises(KeyError):
        metrics.model("small").requests["lost"] += 1


def test_a_refusal_counts_for_the_model_it_named(metrics):
    metrics.reject("small", errors.Overloaded("full"))

    assert value(metrics, "rejected_total", model="small", reason="overloaded") == 1
    assert value(metrics, "rejected_total", model="", reason="overloaded") == 0


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.Overloaded("x"), "overloaded"),
        (errors.InvalidRequest("x"), "invalid"),
        (errors.ContextLengthExceeded("x"), "invalid"),
        (errors.ModelNotFound("x"), "not_found"),
        (errors.NotFound("x"), "not_found"),
        (errors.MethodNotAllowed("x"), "not_found"),
        (errors.BodyTimeout("x"), "body"),
        (errors.BodyTooLarge("x"), "body"),
        (errors.UnsupportedMediaType("x"), "body"),
        (errors.ExpectationFailed("x"), "body"),
        (errors.ServiceUnavailable("x"), "unavailable"),
        (errors.LoadFailed("x"), "unavailable"),
        (errors.ShuttingDown("x"), "shutting_down"),
    ],
)
def test_every_refusal_has_a_reason(error, reason):
    assert rejection(error) == reason


def test_any_error_there_is_has_a_declared_reason(metrics):
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.SlimprocError):
            metrics.reject("small", kind("x"))

    assert sum(metrics.model("small").rejected.values()) > 15


def test_states_are_those_of_the_replicas():
    assert set(STATES) == {state.value for state in ReplicaState}


@pytest.mark.parametrize("name", ['quo"te', "back\\slash", "new\nline", "é😀", "}"])
def test_a_model_of_any_configured_name_can_be_scraped(name):
    metrics = Metrics([name])
    metrics.model(name).prompt_tokens = 3

    assert value(metrics, "prompt_tokens_total", model=name) == 3


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1000), st.integers(1, 5)), max_size=30))
def test_a_histogram_counts_every_observation_up_to_each_bound(observations):
    histogram = Histogram((0.5, 1.0, 250.0))
    for number, times in observations:
        histogram.observe(number, times)

    expected = [
        sum(times for number, times in observations if number <= bound) for bound in (0.5, 1.0, 250.0, math.inf)
    ]
    assert histogram.cumulative() == list(zip(("0.5", "1.0", "250.0", "+Inf"), expected, strict=True))
    assert histogram.count == expected[-1]
    assert histogram.sum == pytest.approx(sum(number * times for number, times in observations))


def test_bounds_ascend_and_are_finite(metrics):
    for attribute in type(metrics.model("small")).__slots__:
        histogram = getattr(metrics.model("small"), attribute)
        if isinstance(histogram, Histogram):
            assert list(histogram.bounds) == sorted(set(histogram.bounds))
            assert all(0 < bound < math.inf for bound in histogram.bounds)


def test_the_scrape_is_prometheus_text(metrics):
    assert Exposition(metrics).content_type.startswith("text/plain; version=")
    text = Exposition(metrics).render().decode()
    assert text.endswith("\n")
    for family in FAMILIES:
        name = PREFIX + family.name
        assert f"# HELP {name} {family.help}\n" in text
        assert f"# TYPE {name} {family.kind}\n" in text


def test_names_follow_the_conventions():
    """As promtool's linter says: base units, counters end in _total and nothing else does, every metric has help."""
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", family.name)
        assert family.name.endswith("_total") == (family.kind == "counter")
        assert not re.search(
            r"_(count|sum|bucket|info|gauge|histogram|counter|ms|milliseconds|percent)(_|$)", family.name
        )
        assert family.help.endswith(".")
        assert not set(family.labels) & {"le", "quantile", "job", "instance"}


def test_the_document_lists_every_metric_and_no_other():
    rows = re.findall(r"^\| `(slimproc_[a-z_]+)` \| (\w+) \|([^|]*)\|", DOCUMENT.read_text(), re.MULTILINE)
    documented = {(name, kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}

    assert documented == {(PREFIX + family.name, family.kind, family.labels) for family in FAMILIES}


def test_the_document_lists_every_value_of_a_label():
    text = DOCUMENT.read_text()

    for one in {*OUTCOMES, *REJECTIONS, *RESTARTS, *LOADS, *STATES}:
        assert f"`{one}`" in text


def test_two_servers_in_one_process_count_apart():
    """Nothing is registered globally, so tests and embedding programs may build as many as they like."""
    first, second = Metrics(["m"]), Metrics(["m"])
    first.model("m").prompt_tokens = 1

    assert value(second, "prompt_tokens_total", model="m") == 0


def test_only_the_exposition_knows_prometheus_client():
    """Elsewhere numbers are counted; metrics.py says in its first lines why."""
    package = Path(slimproc.__path__[0])
    knowing = {
        str(source.relative_to(package))
        for source in package.rglob("*.py")
        if "import prometheus_client" in source.read_text() or "from prometheus_client" in source.read_text()
    }
    assert knowing == {"http/exposition.py"}
