"""What is counted, and under which names and labels.

Counting is plain Python (an attribute and an addition) because a labelled prometheus_client call per token costs more
than the token; ``http/exposition.py`` reads the numbers when someone scrapes. Label values come from the configuration and the
tuples below, never from a request, so the number of series is fixed at the start and all of them exist from then on.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from slimproc import errors, logs

log = logs.get("slimproc.metrics")

PREFIX: Final = "slimproc_"
OUTCOMES: Final = ("ok", "timeout", "cancelled", "engine_error", "engine_crashed", "shutdown")
"""Of requests that were admitted."""
REJECTIONS: Final = ("overloaded", "invalid", "not_found", "unavailable", "shutting_down", "body", "poison")
"""Of requests that were not; see ``rejection``."""
RESTARTS: Final = ("exited", "oom", "stalled", "corrupt", "load_failed", "load_timeout", "device_lost")
"""What was wrong with an engine that ended unasked: it died, was ended for its memory, made no steps, wrote nonsense, never
became ready, or was killed since its GPU was lost.
"""
RESUMES: Final = ("resumed", "refused")
"""Of streams whose engine died under them, of models with ``on_crash: resume``."""
LOADS: Final = ("ok", "failed")
STATES: Final = ("stopped", "starting", "ready", "draining", "stopping", "killing", "backoff", "failed")
"""Of a replica: the values of ``replicas.states.ReplicaState``, which is above this module."""
FAULTS: Final = ("lost", "driver_mismatch", "unknown")
"""Of a GPU: ``residency.probes.faults.KINDS``, which is above this module."""

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
SHORT_SECONDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
TOKENS_PER_SECOND: Final = (1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 10_000.0)
SEQUENCES: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class Family(NamedTuple):
    """One metric. ``name`` has no prefix; ``attribute`` is where ModelMetrics counts it, empty for what it does not."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ("model",)
    attribute: str = ""
    values: tuple[str, ...] = ()
    """Of the last label, when it is not ``model``."""


FAMILIES: Final = (
    Family("queue_depth", "gauge", "Requests that wait for a slot or for their model."),
    Family("inflight_requests", "gauge", "Requests that were handed to an engine and have not ended."),
    Family("replicas", "gauge", "Replicas in each state.", ("model", "state"), values=STATES),
    Family("stuck_processes", "gauge", "Processes that do not end though they were killed."),
    Family("requests_total", "counter", "Admitted requests by how they ended.", ("model", "outcome"), "requests", OUTCOMES),
    Family("rejected_total", "counter", "Requests refused before admission; model is empty when they named none of ours.",
           ("model", "reason"), "rejected", REJECTIONS),
    Family("resumes_total", "counter", "Streams whose engine died: they went on in another one, or could not.",
           ("model", "result"), "resumes", RESUMES),
    Family("queue_wait_seconds", "histogram", "From arrival to hand-over to an engine.", attribute="queue_wait"),
    Family("time_to_first_token_seconds", "histogram", "From arrival to the first token.", attribute="ttft"),
    Family("inter_token_seconds", "histogram", "Between two tokens of one sequence.", attribute="inter_token"),
    Family("decode_tokens_per_second", "histogram", "Tokens per second of one sequence after its first token.",
           attribute="decode_rate"),
    Family("request_duration_seconds", "histogram", "From arrival to the end, of requests that ended ok.",
           attribute="request_duration"),
    Family("prompt_tokens_total", "counter", "Tokens of prompts.", attribute="prompt_tokens"),
    Family("cached_prompt_tokens_total", "counter", "Prompt tokens that were taken from a prefix already computed.",
           attribute="cached_prompt_tokens"),
    Family("generated_tokens_total", "counter", "Tokens that engines generated.", attribute="generated_tokens"),
    Family("batch_size", "histogram", "Sequences that got a token in one step of an engine.", attribute="batch_size"),
    Family("engine_restarts_total", "counter", "Engines that ended unasked, by what was wrong.", ("model", "reason"),
           "engine_restarts", RESTARTS),
    Family("model_loads_total", "counter", "Loads of the model into an engine.", ("model", "outcome"), "loads", LOADS),
    Family("model_load_seconds", "histogram", "From an engine's start to READY, of loads that ended ok.",
           attribute="load_seconds"),
    Family("evictions_total", "counter", "Times the model had to make room for another.", attribute="evictions"),
    Family("memory_bytes", "gauge", "Memory of each device, as the ledger counts it.", ("device", "kind")),
    Family("device_fault", "gauge", "1 while a GPU, or the driver as a whole, has a fault of the kind.", ("device", "kind"),
           values=FAULTS),
    Family("profile_write_failures_total", "counter", "Times that what a model was seen to need could not be kept.", ()),
    Family("ring_full_total", "counter", "Times an engine found its ring full.", attribute="ring_full"),
    Family("event_loop_lag_seconds", "histogram", "How late the front's event loop wakes from a timer.", ()),
)  # fmt: skip
"""Every metric, in the order of the answer; ``docs/metrics.md`` has the same table for people."""


class Histogram:
    """Counts per bucket and their sum. ``bounds`` are upper bounds, inclusive, ascending."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value`` ``times`` times: tokens that came in one wake-up are counted together."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus buckets: (upper bound, observations up to it), the last one ``+Inf``."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == math.inf else repr(bound), total))
        return buckets


class GapHistogram(Histogram):
    """For times that come in runs of equal ones: the sequences of a batch share the gap between two steps, so counting
    that it came again replaces most observations. In nanoseconds, since equal is what matters.
    """

    __slots__ = ("repeats", "run_ns")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        super().__init__(bounds)
        self.run_ns = 0
        self.repeats = 0

    def begin(self, gap_ns: int, times: int = 1) -> None:
        """``gap_ns`` came ``times`` times. A caller that finds it equal to ``run_ns`` may add to ``repeats`` instead."""
        self.settle()
        self.run_ns, self.repeats = gap_ns, times

    def settle(self) -> None:
        """Count the run that goes on; before anything is read."""
        repeats, self.repeats = self.repeats, 0
        if repeats:
            self.observe(self.run_ns / 1e9, repeats)

    @property
    def count(self) -> int:
        self.settle()
        return super().count

    def cumulative(self) -> list[tuple[str, float]]:
        self.settle()
        return super().cumulative()


class ModelMetrics:
    """The numbers of one configured model. Owners add to the attributes; an unknown outcome or reason is a KeyError."""

    __slots__ = (
        "batch_size", "cached_prompt_tokens", "decode_rate", "engine_restarts", "evictions", "generated_tokens", "inter_token",
        "load_seconds", "loads", "prompt_tokens", "queue_wait", "rejected", "request_duration", "requests", "resumes",
        "ring_full", "ttft",
    )  # fmt: skip

    def __init__(self) -> None:
        self.queue_wait = Histogram(SECONDS)
        self.ttft = Histogram(SECONDS)
        self.inter_token = GapHistogram(SHORT_SECONDS)
        self.decode_rate = Histogram(TOKENS_PER_SECOND)
        self.request_duration = Histogram(SECONDS)
        self.load_seconds = Histogram(SECONDS)
        self.batch_size = Histogram(SEQUENCES)
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.generated_tokens = 0
        self.ring_full = 0
        self.evictions = 0
        self.requests = dict.fromkeys(OUTCOMES, 0)
        self.rejected = dict.fromkeys(REJECTIONS, 0)
        self.engine_restarts = dict.fromkeys(RESTARTS, 0)
        self.resumes = dict.fromkeys(RESUMES, 0)
        self.loads = dict.fromkeys(LOADS, 0)


Reading = Mapping[Any, float]
"""A gauge's values by model, or by (model, state), where what is missing is 0 and what is not configured is left out; or by
the labels of a family that has no model.
"""


class Metrics:
    """All numbers of one server. Counted and scraped on the event loop, so nothing here locks."""

    def __init__(self, models: Iterable[str]) -> None:
        self._models = {name: ModelMetrics() for name in models}
        self._gone: set[str] = set()
        self._unnamed_rejected = dict.fromkeys(REJECTIONS, 0)
        self._gauges: dict[str, Callable[[], Reading]] = {}
        self.event_loop_lag = Histogram(SHORT_SECONDS)
        self.of_the_server: dict[str, Callable[[], float]] = {}
        """What counts the counters that have no labels, by their names; 0 where nothing does."""

    def __repr__(self) -> str:
        return f"<Metrics of {', '.join(self._models) or 'no model'}>"

    def model(self, name: str) -> ModelMetrics:
        """Where the model called ``name`` in the configuration counts. KeyError for any other name."""
        return self._models[name]

    def add(self, name: str) -> None:
        """A model has come, or has come back: then it counts on where it was."""
        self._models.setdefault(name, ModelMetrics())
        self._gone.discard(name)

    def remove(self, name: str) -> None:
        """A model is no more: it has no gauges. What was counted stays until the server ends, as counters must not fall."""
        self._gone.add(name)

    def reject(self, model: str | None, error: errors.SlimprocError) -> None:
        """Count a request that was refused. ``model`` may be what the caller wrote: it becomes no label of its own."""
        known = self._models.get(model) if model is not None else None
        rejected = self._unnamed_rejected if known is None else known.rejected
        rejected[rejection(error)] += 1

    def gauge(self, name: str, read: Callable[[], Reading]) -> None:
        """Have ``read`` called at every scrape for the gauge ``name`` (without prefix). KeyError if there is none."""
        if not any(family.name == name and family.kind == "gauge" for family in FAMILIES):
            raise KeyError(name)
        self._gauges[name] = read

    def read_gauge(self, name: str) -> Reading | None:
        """What the owner of a gauge says now; empty before it has one, None when it fails: no value beats a wrong one."""
        try:
            return self._gauges[name]() if name in self._gauges else {}
        except Exception:  # one owner's bug must not cost the scrape
            log.exception("a gauge could not be read", metric=name)
            return None

    def rows(self, family: Family) -> Iterator[tuple[list[str], Any]]:
        """The label values and the number or Histogram of every series of a counter or histogram."""
        if not family.labels:
            yield [], self._of_the_server(family)
            return
        for name, model in self._models.items():
            counted = getattr(model, family.attribute)
            if isinstance(counted, dict):
                yield from (([name, value], number) for value, number in counted.items())
            else:
                yield [name], counted
        if family.name == "rejected_total":
            yield from ((["", reason], number) for reason, number in self._unnamed_rejected.items())

    def _of_the_server(self, family: Family) -> float | Histogram:
        if family.kind == "histogram":
            return self.event_loop_lag
        read = self.of_the_server.get(family.name)
        return 0 if read is None else read()

    def gauge_rows(self, family: Family) -> Iterator[tuple[list[str], float]]:
        """The same of a gauge; none when it cannot be read."""
        reading = self.read_gauge(family.name)
        if reading is None:
            return
        if family.labels[0] != "model":  # the hardware's own, which no caller can make more of
            yield from ((list(key), value) for key, value in sorted(reading.items()))
            return
        for name in (name for name in self._models if name not in self._gone):
            if family.values:
                yield from (([name, value], reading.get((name, value), 0)) for value in family.values)
            else:
                yield [name], reading.get(name, 0)


def rejection(error: errors.SlimprocError) -> str:
    """The reason in ``rejected_total``: coarser than the error's code, so that a new code needs no new series."""
    match error:
        case errors.Overloaded():
            return "overloaded"
        case errors.Quarantined():
            return "poison"
        case errors.ShuttingDown():
            return "shutting_down"
        case errors.ModelNotFound() | errors.NotFound() | errors.MethodNotAllowed():
            return "not_found"
        case errors.BodyTimeout() | errors.BodyTooLarge() | errors.UnsupportedMediaType() | errors.ExpectationFailed():
            return "body"
    return "invalid" if error.status < 500 else "unavailable"
