"""The dashboard and the alert rules ask for metrics that exist, by labels that they have, with values that occur."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from slimproc.metrics import FAMILIES, PREFIX, Family

DIRECTORY = Path(__file__).resolve().parent.parent / "docs" / "grafana"
OF_PROMETHEUS = {"job", "instance"}
"""Labels that a scrape adds."""
NOT_OURS = {"up"}

_SELECTOR = re.compile(rf"\b({PREFIX}\w+|up\b)(?:\{{([^}}]*)\}})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_CLAUSE = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_LEGEND = re.compile(r"\{\{\s*(\w+)\s*\}\}")


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((DIRECTORY / "alerts.yaml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    return json.loads((DIRECTORY / "dashboard.json").read_text())


def targets() -> Iterator[tuple[str, dict[str, Any]]]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target


def queries() -> dict[str, str]:
    """Every PromQL expression by where it stands."""
    of_rules = {rule["alert"]: rule["expr"] for rule in rules()}
    return of_rules | {f"{title} {target['refId']}": target["expr"] for title, target in targets()}


def family(name: str) -> tuple[Family, set[str]]:
    """The family of a sample's name, and the labels that the sample has. AssertionError: there is none."""
    plain = name.removeprefix(PREFIX)
    for one in FAMILIES:
        if one.name == plain and one.kind != "histogram":
            return one, {*one.labels}
        for suffix, more in (("_bucket", {"le"}), ("_sum", set()), ("_count", set())):
            if one.kind == "histogram" and one.name + suffix == plain:
                return one, {*one.labels} | more
    raise AssertionError(f"there is no metric {name}")


def problems(query: str) -> list[str]:
    """What is wrong with an expression; empty: nothing."""
    found: list[str] = []
    known = set(OF_PROMETHEUS)
    selectors = list(_SELECTOR.finditer(query))
    if not selectors:
        found.append("it asks for nothing of ours")
    for selector in selectors:
        name, matchers = selector[1], selector[2] or ""
        if name in NOT_OURS:
            continue
        try:
            one, labels = family(name)
        except AssertionError as error:
            found.append(str(error))
            continue
        known |= labels
        for label, _, values in _MATCHER.findall(matchers):
            if label not in labels | OF_PROMETHEUS:
                found.append(f"{name} has no label {label}")
            if one.values and label == one.labels[-1]:
                found += [f"{label} is never {value}" for value in values.split("|") if value not in one.values]
        before = query[: selector.start()]
        rated = re.search(r"\b(rate|increase)\(\s*$", before) is not None
        if rated == (one.kind == "gauge"):
            found.append(f"{name} is a {one.kind}")
    used = {label.strip() for clause in _CLAUSE.findall(query) for label in clause.split(",")}
    return found + [f"nothing here has a label {label}" for label in sorted(used - known)]


@pytest.mark.parametrize("place", queries())
def test_every_query_names_metrics_that_exist_with_labels_that_they_have(place: str) -> None:
    assert problems(queries()[place]) == []


@pytest.mark.parametrize(
    ("query", "wrong"),
    [
        ("slimproc_queue_dept > 1", "there is no metric"),
        ('slimproc_queue_depth{modle="x"} > 1', "has no label modle"),
        ('slimproc_replicas{state=~"failed|sleeping"} > 1', "state is never sleeping"),
        ("sum by (outcome) (slimproc_queue_depth)", "nothing here has a label outcome"),
        ("sum(slimproc_requests_total)", "is a counter"),
        ("rate(slimproc_queue_depth[5m])", "is a gauge"),
        ("rate(slimproc_queue_wait_seconds[5m])", "there is no metric"),
        ("rate(slimproc_requests_total_bucket[5m])", "there is no metric"),
        ("vector(1)", "nothing of ours"),
    ],
)
def test_a_query_that_could_never_answer_is_found(query: str, wrong: str) -> None:
    """The check above can fail."""
    assert any(wrong in problem for problem in problems(query))


def test_every_metric_is_on_the_dashboard() -> None:
    shown = {family(name)[0].name for _, target in targets() for name, _ in _SELECTOR.findall(target["expr"])}
    assert shown == {one.name for one in FAMILIES}


def test_a_legend_names_only_labels_that_the_query_leaves() -> None:
    for title, target in targets():
        clauses = _CLAUSE.findall(target["expr"])
        left = {label.strip() for clause in clauses for label in clause.split(",")}
        if not clauses:
            left = set.union(*(family(name)[1] for name, _ in _SELECTOR.findall(target["expr"]))) | OF_PROMETHEUS
        assert set(_LEGEND.findall(target["legendFormat"])) <= left - {"le"}, title


def test_panels_have_their_own_place_and_number() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_every_variable_of_the_dashboard_is_declared_and_asks_for_a_label_that_exists() -> None:
    declared = {variable["name"]: variable for variable in dashboard()["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard()["panels"])))
    assert used - {"__rate_interval"} == set(declared)
    for variable in declared.values():
        if variable["type"] == "query":
            name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]).groups()
            assert label in family(name)[1] | OF_PROMETHEUS


def test_every_alert_says_how_bad_it_is_and_what_it_means() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_the_page_has_a_line_for_every_alert() -> None:
    page = (DIRECTORY / "README.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == {rule["alert"] for rule in rules()}


def test_every_alert_has_a_unit_test_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    cases = yaml.safe_load((DIRECTORY / "alerts.test.yaml").read_text())["tests"]
    tested = [(one["alertname"], bool(one["exp_alerts"])) for case in cases for one in case["alert_rule_test"]]
    assert set(tested) == {(rule["alert"], fires) for rule in rules() for fires in (True, False)}
