"""Summary: what the samples of one run come to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import msgspec

from slimproc.bench.plan import Plan
from slimproc.bench.quantiles import quantile, weighted_quantile
from slimproc.bench.sample import CANCELLED, ERROR, OK, REFUSED, Sample


class Spread(msgspec.Struct, frozen=True):
    """Of a time, in seconds; ``count`` is how many there were. All None when there was none."""

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Times are of requests that ended ok, but for ``refusal`` and ``late``; rates are per second of ``wall``."""

    requests: int
    ok: int
    refused: int
    cancelled: int
    errors: int
    kinds: dict[str, int]
    """Of errors and refusals: how many of each kind."""
    examples: dict[str, str]
    """What the first of each kind said."""
    wall: float
    requests_per_s: float
    tokens: int
    """Of all answers, also of those that were left or broke off: somebody computed them."""
    tokens_by: str
    """``usage``, ``events``, or ``both``: who counted them."""
    tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int
    good: int | None
    """Ended ok and within every stated limit; None: none was stated."""
    goodput: float | None
    """Good ones per second."""
    ttft: Spread
    itl: Spread
    """Of all gaps of all answers."""
    latency: Spread
    refusal: Spread
    late: Spread
    """How long after its time each request was sent: the client's own share in open-loop times."""
    client_cpu: float
    """Seconds."""
    client_cpu_us_per_token: float | None


def summarize(samples: Sequence[Sample], plan: Plan, *, wall: float, cpu: float) -> Summary:
    fine = [sample for sample in samples if sample.outcome == OK]
    outcomes = Counter(sample.outcome for sample in samples)
    failed = [sample for sample in samples if sample.kind]
    tokens = sum(sample.tokens for sample in samples)
    good = sum(_good(sample, plan) for sample in fine) if plan.slo_ttft or plan.slo_itl else None
    per_second = 1 / wall if wall > 0 else 0.0
    return Summary(
        requests=len(samples),
        ok=len(fine),
        refused=outcomes[REFUSED],
        cancelled=outcomes[CANCELLED],
        errors=outcomes[ERROR],
        kinds=dict(Counter(sample.kind for sample in failed).most_common()),
        examples={sample.kind: sample.detail for sample in reversed(failed)},
        wall=wall,
        requests_per_s=len(fine) * per_second,
        tokens=tokens,
        tokens_by=_tokens_by({sample.tokens_by for sample in samples if sample.tokens_by}),
        tokens_per_s=tokens * per_second,
        prompt_tokens=sum(sample.prompt_tokens or 0 for sample in samples),
        cached_tokens=sum(sample.cached_tokens or 0 for sample in samples),
        good=good,
        goodput=None if good is None else good * per_second,
        ttft=spread(sample.ttft for sample in fine if sample.ttft is not None),
        itl=_gaps(fine),
        latency=spread(sample.latency for sample in fine),
        refusal=spread(sample.latency for sample in samples if sample.outcome == REFUSED),
        late=spread(sample.late for sample in samples),
        client_cpu=cpu,
        client_cpu_us_per_token=cpu / tokens * 1e6 if tokens else None,
    )


def spread(values: Iterable[float]) -> Spread:
    ordered = sorted(values)
    if not ordered:
        return Spread()
    p50, p90, p99 = (quantile(ordered, share) for share in (0.5, 0.9, 0.99))
    return Spread(len(ordered), sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


def _good(sample: Sample, plan: Plan) -> bool:
    """An answer of one token keeps every limit of the time between tokens."""
    in_time = plan.slo_ttft is None or (sample.ttft is not None and sample.ttft <= plan.slo_ttft)
    return in_time and (plan.slo_itl is None or sample.itl_mean is None or sample.itl_mean <= plan.slo_itl)


def _gaps(samples: Sequence[Sample]) -> Spread:
    """A read's first token waited for; the others of that read came with it."""
    seen = [sample.gaps for sample in samples if sample.gaps is not None]
    gaps = sorted(chain.from_iterable(gaps[1:] for gaps, _ in seen))
    between = sum(sum(counts) - 1 for _, counts in seen)
    if between < 1:
        return Spread()
    pairs = [(0.0, between - len(gaps)), *((gap, 1) for gap in gaps)]
    p50, p90, p99 = (weighted_quantile(pairs, share) for share in (0.5, 0.9, 0.99))
    return Spread(between, sum(gaps) / between, p50, p90, p99, gaps[-1] if gaps else 0.0)


def _tokens_by(counted: set[str]) -> str:
    return counted.pop() if len(counted) == 1 else "both" if counted else ""
