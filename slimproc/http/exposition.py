"""The Prometheus text of what ``metrics.py`` counts."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from slimproc.metrics import FAMILIES, PREFIX, Metrics


class Exposition:
    """One collector in a registry of its own, which nobody else's metrics can get into."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, metrics: Metrics) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Reader(metrics))

    def render(self) -> bytes:
        """The text, of ``content_type``."""
        return generate_latest(self._registry)


class _Reader(Collector):
    """Turns the plain numbers into prometheus_client's families at a scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        for family in FAMILIES:
            name = PREFIX + family.name
            if family.kind == "gauge":
                gauge = GaugeMetricFamily(name, family.help, labels=family.labels)
                for labels, value in self._metrics.gauge_rows(family):
                    gauge.add_metric(labels, value)
                yield gauge
            elif family.kind == "counter":
                counter = CounterMetricFamily(name, family.help, labels=family.labels)
                for labels, value in self._metrics.rows(family):
                    counter.add_metric(labels, value)
                yield counter
            else:
                histogram = HistogramMetricFamily(name, family.help, labels=family.labels)
                for labels, value in self._metrics.rows(family):
                    histogram.add_metric(labels, value.cumulative(), value.sum)
                yield histogram
