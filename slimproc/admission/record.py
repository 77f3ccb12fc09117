"""The record of one request that has ended: what it adds to the metrics, and its line in the log."""

from __future__ import annotations

from slimproc import logs
from slimproc.admission.admitted import REFUSALS, Admitted, Timeline
from slimproc.admission.generation import Generation
from slimproc.admission.passage import Passage
from slimproc.errors import SlimprocError
from slimproc.metrics import Metrics, ModelMetrics
from slimproc.request import GENERATE, GenerateRequest

log = logs.get("slimproc.generation")


def keep(request: Admitted, metrics: Metrics) -> None:
    """Count it and write its line, once."""
    model = request.request.model
    if request.outcome in REFUSALS:
        assert request.error is not None
        metrics.reject(model, request.error)
    else:
        numbers = metrics.model(model)
        numbers.requests[request.outcome] += 1
        if request.outcome == "ok":
            numbers.request_duration.observe(request.times.ended - request.times.arrived)
        if isinstance(request, Generation):
            _count_tokens(request, numbers)
    if isinstance(request, Generation):
        _log_generation(request)
    elif isinstance(request, Passage):
        _log_passage(request)


def _count_tokens(generation: Generation, metrics: ModelMetrics) -> None:
    times = generation.times
    metrics.resumes["resumed"] += generation.resumed
    if generation.outcome == "engine_crashed" and _may_resume(generation):
        metrics.resumes["refused"] += sum(stream.delivered for stream in generation.streams)
    for stream in generation.streams:
        metrics.prompt_tokens += stream.usage.prompt_tokens
        metrics.cached_prompt_tokens += stream.usage.cached_tokens
    if times.first_text:
        metrics.ttft.observe(times.first_text - times.arrived)
    if generation.outcome == "ok":
        for stream in generation.streams:
            if stream.completion_tokens > 1 and stream.last_at_ns > stream.first_at_ns and stream.said is None:
                seconds = (stream.last_at_ns - stream.first_at_ns) / 1e9
                metrics.decode_rate.observe((stream.completion_tokens - 1) / seconds)


def _may_resume(generation: Generation) -> bool:
    return isinstance(generation.request, GenerateRequest) and generation.request.on_crash == "resume"


def _log_generation(generation: Generation) -> None:
    times, streams = generation.times, generation.streams
    log.info(
        "generation finished",
        request_id=generation.request.id,
        model=generation.request.model,
        replica=generation.engine_name,
        task=generation.request.capability,
        outcome=generation.outcome,
        finish_reason=_finish_reasons(generation),
        prompt_tokens=sum(stream.usage.prompt_tokens for stream in streams),
        completion_tokens=sum(stream.completion_tokens for stream in streams),
        cached_tokens=sum(stream.usage.cached_tokens for stream in streams),
        resumed=generation.resumed or None,
        load_wait_ms=_load_wait_ms(times),
        queue_wait_ms=_queue_wait_ms(times),
        ttft_ms=_ms(times.first_text - times.arrived) if times.first_text else None,
        duration_ms=_ms(times.ended - times.arrived),
        reason=_reason(generation.error),
    )


def _log_passage(passage: Passage) -> None:
    times = passage.times
    log.info(
        "request forwarded" if passage.started else "request not forwarded",
        request_id=passage.request.id,
        model=passage.request.model,
        replica=passage.engine_name,
        outcome=passage.outcome,
        status=passage.status,
        bytes_in=passage.bytes_in,
        bytes_out=passage.bytes_out,
        load_wait_ms=_load_wait_ms(times),
        queue_wait_ms=_queue_wait_ms(times),
        duration_ms=_ms(times.ended - times.arrived),
        reason=_reason(passage.error),
    )


def _finish_reasons(generation: Generation) -> str | None:
    """One for each choice; None for what generates nothing, and so cannot end in more than one way."""
    if generation.request.capability != GENERATE:
        return None
    return ",".join(stream.finish.reason for stream in generation.streams if stream.ended and not stream.error)


def _reason(error: SlimprocError | None) -> str | None:
    """What is told to a caller who was wrong may quote the prompt, which belongs in no log: the code has to do."""
    if error is None:
        return None
    return error.message if error.status >= 500 else error.code


def _load_wait_ms(times: Timeline) -> float:
    """The part of the wait in the queue in which its model could not serve; 0 where it could from the beginning."""
    return _ms((times.ready or times.ended) - times.arrived)


def _queue_wait_ms(times: Timeline) -> float:
    return _ms((times.granted or times.ended) - times.arrived)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
