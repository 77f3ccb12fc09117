"""What Prometheus's promtool says of the metrics' text, of the alert rules and of the dashboard's queries."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from slimproc.errors import Overloaded
from slimproc.http.exposition import Exposition
from slimproc.metrics import FAMILIES, PREFIX, Metrics
from tests.promtool import needs_promtool, promtool
from tests.test_grafana import DIRECTORY, rules, targets

pytestmark = needs_promtool


def scraped(metrics: Metrics) -> bytes:
    return Exposition(metrics).render()


def test_the_metrics_text_is_right_and_keeps_the_rules_of_naming() -> None:
    metrics = Metrics(["small", 'a "quoted\\ name\n'])
    metrics.gauge("memory_bytes", lambda: {("host", "free"): 1 << 40, ("GPU-1", "held"): 0})
    for name in ("small", 'a "quoted\\ name\n'):
        model = metrics.model(name)
        model.ttft.observe(0.3)
        model.inter_token.begin(1000)
        model.requests["ok"] += 1
    metrics.reject("nobody's", Overloaded("full"))
    status, said = promtool("check", "metrics", given=scraped(metrics))
    assert (status, said) == (0, "")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (rb"# TYPE slimproc_requests_total counter", rb"# TYPE slimproc_requests_total gauge"),
        (rb"slimproc_prompt_tokens_total\b", rb"slimproc_prompt_tokens"),
        (rb"# HELP slimproc_queue_depth [^\n]*\n", rb""),
        (rb'model="small"', rb'model=small"'),
    ],
)
def test_promtool_finds_what_is_wrong_with_a_metrics_text(right: bytes, wrong: bytes) -> None:
    """The check above can fail."""
    text, changed = re.subn(right, wrong, scraped(Metrics(["small"])))
    assert changed
    assert promtool("check", "metrics", given=text)[0] != 0


def test_the_alert_rules_are_valid() -> None:
    status, said = promtool("check", "rules", "alerts.yaml", cwd=DIRECTORY)
    assert status == 0, said
    assert f"{len(rules())} rules found" in said


def test_every_alert_fires_when_it_should_and_keeps_quiet_when_it_should() -> None:
    status, said = promtool("test", "rules", "alerts.test.yaml", cwd=DIRECTORY)
    assert status == 0, said


@pytest.mark.parametrize("alert", [rule["alert"] for rule in rules()])
def test_the_unit_tests_fail_when_an_alert_is_turned_round(alert: str, tmp_path: Path) -> None:
    document = yaml.safe_load((DIRECTORY / "alerts.yaml").read_text())
    for rule in document["groups"][0]["rules"]:
        if rule["alert"] == alert:
            rule["expr"] = f"({rule['expr']}) unless on () vector(1)"  # never
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(document))
    shutil.copy(DIRECTORY / "alerts.test.yaml", tmp_path)
    status, said = promtool("test", "rules", "alerts.test.yaml", cwd=tmp_path)
    assert status != 0
    assert alert in said


def test_every_query_of_the_dashboard_is_promql(tmp_path: Path) -> None:
    plain = [re.sub(r"\$(\w+)", "x", target["expr"].replace("$__rate_interval", "5m")) for _, target in targets()]
    recorded = [{"record": f"dashboard:{number}", "expr": expr} for number, expr in enumerate(plain)]
    (tmp_path / "dashboard.yaml").write_text(yaml.safe_dump({"groups": [{"name": "d", "rules": recorded}]}))
    status, said = promtool("check", "rules", "dashboard.yaml", cwd=tmp_path)
    assert status == 0, said


def test_the_questions_of_the_metrics_page_are_promql(tmp_path: Path) -> None:
    page = (DIRECTORY.parent / "metrics.md").read_text()
    asked = re.findall(r"`([^`]*slimproc_[^`]*[(){}=][^`]*)`", page)
    assert len(asked) >= 6
    recorded = [{"record": f"page:{number}", "expr": expr} for number, expr in enumerate(asked)]
    (tmp_path / "page.yaml").write_text(yaml.safe_dump({"groups": [{"name": "p", "rules": recorded}]}))
    status, said = promtool("check", "rules", "page.yaml", cwd=tmp_path)
    assert status == 0, said


def test_every_family_is_in_the_text() -> None:
    text = scraped(Metrics(["m"])).decode()
    assert set(re.findall(r"# TYPE (\w+) ", text)) == {PREFIX + family.name for family in FAMILIES}
