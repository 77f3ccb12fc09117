"""A real Prometheus scrapes a real server: all is taken in, the alert rules run, and no caller adds a series."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.promtool import PROMETHEUS, needs_prometheus
from tests.serving import LIMIT, ServerProcess, fake, wait_until
from tests.test_grafana import DIRECTORY, queries, rules

pytestmark = [needs_prometheus, pytest.mark.slow]
NONSENSE = 2000


class Prometheus:
    """Its server in a process of its own, scraping one port every second; ``ask`` is its query API."""

    def __init__(self, directory: Path, port: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        target = {"job_name": "slimproc", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "scrape_configs": [target],
            "rule_files": [str(DIRECTORY / "alerts.yaml")],
        }
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.log = directory / "log"
        assert PROMETHEUS is not None
        command = [
            PROMETHEUS,
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def api(self, path: str, **parameters: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=LIMIT) as answer:
            return json.loads(answer.read())["data"]

    def ask(self, query: str) -> float | None:
        """The value of a query that has one; None: there is none (yet)."""
        assert self.process.poll() is None, self.log.read_text()
        try:
            found = self.api("query", query=query)["result"]
        except OSError:  # it is only starting
            return None
        return float(found[0]["value"][1]) if found else None

    def wait(self, query: str, value: float) -> None:
        wait_until(lambda: self.ask(query) == value, f"{query} is {value}; its log: {self.log.read_text()}")

    def wait_scrapes(self, count: int) -> None:
        """Until so many more scrapes have gone well."""
        before = self.ask('count_over_time(up{job="slimproc"}[1h])') or 0
        wait_until(
            lambda: (self.ask('count_over_time(up{job="slimproc"}[1h])') or 0) >= before + count,
            f"{count} more scrapes",
        )

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), fake(slots=2, max_queue=2)) as process:
        yield process.wait_ready()


@pytest.fixture(scope="module")
def prometheus(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    running = Prometheus(tmp_path_factory.mktemp("prometheus"), server.port)
    try:
        running.wait('up{job="slimproc"}', 1)
        yield running
    finally:
        running.close()


def series(server: ServerProcess) -> set[str]:
    """Every series of a scrape, without its value."""
    lines = server.get("/metrics").body.decode().splitlines()
    return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}


def ask_nonsense(server: ServerProcess) -> None:
    """Models and paths that nobody has, methods too, over one connection."""
    connection = server.connect()
    seen = set()
    for number in range(NONSENSE):
        name = f'n{number:x}\u00fc"{{}}\\n'
        if number % 2:
            body = json.dumps({"model": name, "prompt": "x"}).encode()
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        else:
            connection.request(
                "GET" if number % 4 else "DELETE", f"/{urllib.parse.quote(name)}/{number}?model={number}"
            )
        answer = connection.getresponse()
        answer.read()
        seen.add(answer.status)
    assert seen == {404}


def test_two_thousand_names_that_nobody_has_add_fewer_than_fifty_series(
    server: ServerProcess, prometheus: Prometheus
) -> None:
    """None, in fact. Prometheus keeps as many series as before, and a scrape has as many samples and bytes."""
    assert server.complete("hi", max_tokens=3).status == 200
    prometheus.wait("sum(slimproc_requests_total)", 1)
    before, text = series(server), len(server.get("/metrics").body)
    stored = prometheus.ask('count({job="slimproc"})')
    samples = prometheus.ask("scrape_samples_scraped")
    assert samples == len(before)

    ask_nonsense(server)

    counted = server.metric("rejected_total", model="", reason="not_found")
    assert counted >= NONSENSE / 2
    prometheus.wait('sum(slimproc_rejected_total{reason="not_found"})', counted)
    assert series(server) == before
    assert prometheus.ask('count({job="slimproc"})') == stored
    assert prometheus.ask("max_over_time(scrape_samples_scraped[1h])") == samples
    # Numbers have become longer, and nothing else.
    assert len(server.get("/metrics").body) < text + 20 * len(before)


def test_prometheus_takes_in_every_sample_and_reads_the_numbers_as_they_are(
    server: ServerProcess, prometheus: Prometheus
) -> None:
    assert server.complete("hello", max_tokens=7).status == 200
    generated = server.metric("generated_tokens_total", model="fake")
    prometheus.wait('slimproc_generated_tokens_total{model="fake"}', generated)
    assert prometheus.ask("scrape_samples_post_metric_relabeling") == prometheus.ask("scrape_samples_scraped")
    names = prometheus.api("label/__name__/values")
    plain = {re.sub(r"\{.*", "", one) for one in series(server)}
    assert plain <= set(names)


def test_all_alert_rules_are_evaluated_and_none_fires_on_a_server_that_is_well(prometheus: Prometheus) -> None:
    def evaluated() -> list[dict[str, Any]]:
        loaded = [rule for group in prometheus.api("rules")["groups"] for rule in group["rules"]]
        return loaded if all(rule["health"] == "ok" for rule in loaded) else []

    loaded = wait_until(evaluated, "every rule was evaluated")
    assert {rule["name"] for rule in loaded} == {rule["alert"] for rule in rules()}
    assert {rule["state"] for rule in loaded} == {"inactive"}


def test_every_query_of_the_dashboard_is_answered(server: ServerProcess, prometheus: Prometheus) -> None:
    """By a server that serves; only what has not happened (an error, an eviction) has nothing to say."""
    prometheus.wait_scrapes(3)
    silent = set()
    for place, query in queries().items():
        plain = query.replace("$__rate_interval", "1m").replace("$instance", ".*").replace("$model", ".*")
        if not prometheus.api("query", query=plain)["result"]:
            silent.add(place)
    assert silent <= {*(rule["alert"] for rule in rules()), "Memory A"}
