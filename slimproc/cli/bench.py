"""``slimproc bench``: flags become a plan, the plan is run, and what came out is shown and written down."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import msgspec
import uvloop

from slimproc.bench import rows
from slimproc.bench.benchmark import Benchmark, Side, choose_model
from slimproc.bench.failures import BadPlan, Unreachable
from slimproc.bench.plan import Plan
from slimproc.bench.target import Target
from slimproc.bench.versus import compare
from slimproc.cli import bench_output
from slimproc.cli.bench_progress import Progress

_COUNTS = ("streams", "requests", "max_tokens", "prompt_words", "shared_prefix", "prefixes", "warmup", "seed")
_NUMBERS = ("rate", "duration", "cancel", "timeout", "slo_ttft", "slo_itl")
_MOST_ROUNDS = 1000
_INTERRUPTED = 130


class Files(NamedTuple):
    json: TextIO | None
    csv: TextIO | None


def bench(flags: Mapping[str, Any]) -> int:
    """Status 0: it was measured, and nothing failed. 1: a server was not there, went away or made errors. 2: the flags
    make no sense. 130: it was interrupted; what was measured until then is shown.
    """
    try:
        plan, targets, rounds = _plan(flags), _targets(flags), _rounds(flags)
        models = [flags["model"], flags["peer_model"] if flags["peer_model"] is not None else flags["model"]]
        with contextlib.ExitStack() as opened:
            files = Files(_open(flags, "json", opened), _open(flags, "csv", opened))
            return uvloop.run(_run(plan, list(zip(targets, models, strict=False)), rounds, files))
    except BadPlan as error:
        print(f"slimproc bench: {error}", file=sys.stderr)
        return 2
    except Unreachable as error:
        print(f"slimproc bench: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # a disk that is full, a reader of stdout that has gone
        print(f"slimproc bench: what was measured cannot be written: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED


async def _run(plan: Plan, wanted: Sequence[tuple[Target, str | None]], rounds: int, files: Files) -> int:
    sides = [Side(target, await choose_model(target, model)) for target, model in wanted]
    _allow_descriptors()
    with Progress(sides, rounds) as progress:
        benchmark = Benchmark(sides, plan, rounds, progress.watch)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, benchmark.stop)
        await benchmark.run()
    if sys.stdout not in files:
        bench_output.show(benchmark)
    _write(benchmark, files)
    return _status(benchmark)


def _status(benchmark: Benchmark) -> int:
    if benchmark.gone:
        print(f"slimproc bench: {benchmark.gone}; this is what was measured", file=sys.stderr)
        return 1
    if benchmark.stopped:
        print("slimproc bench: interrupted; this is what was measured", file=sys.stderr)
        return _INTERRUPTED
    failed = sum(turn.summary.errors for turn in benchmark.turns)
    if failed:
        print(f"slimproc bench: {failed} requests failed", file=sys.stderr)
    return 1 if failed else 0


def _write(benchmark: Benchmark, files: Files) -> None:
    table = [
        rows.row(sample, benchmark.sides[turn.side].target.url, turn.number)
        for turn in benchmark.turns
        for sample in turn.samples
    ]
    if files.csv is not None:
        rows.write_csv(files.csv, table)
    if files.json is not None:
        document = {
            "plan": msgspec.to_builtins(benchmark.plan),
            "servers": [{"url": side.target.url, "model": side.model} for side in benchmark.sides],
            "summary": [benchmark.whole(place) for place in range(len(benchmark.sides))],
            "rounds": [
                {"round": turn.number, "server": benchmark.sides[turn.side].target.url, "summary": turn.summary}
                for turn in benchmark.turns
            ],
            "comparisons": compare(benchmark.pairs()),
            "interrupted": benchmark.stopped,
            "gone": benchmark.gone or None,
            "requests": table,
        }
        rows.write_json(files.json, document)


# --- what was asked for -----------------------------------------------------------------------------------------------------


def _plan(flags: Mapping[str, Any]) -> Plan:
    given: dict[str, Any] = {name: _number(flags, name, int) for name in _COUNTS}
    given |= {name: _number(flags, name, float) for name in _NUMBERS}
    for name in ("slo_ttft", "slo_itl"):
        given[name] = None if given[name] is None else given[name] / 1000
    if given["streams"] is not None and given["rate"] is not None:
        raise BadPlan("--streams is of a closed loop and --rate of an open one: give one of them")
    plan = {name: value for name, value in given.items() if value is not None}
    return Plan(
        chat=not flags["completions"],
        stream=flags["stream"],
        usage=flags["usage"],
        fields=_fields(flags["field"] or ()),
        **plan,
    )


def _targets(flags: Mapping[str, Any]) -> list[Target]:
    targets = [Target.parse(flags["url"], flags["api_key"])]
    if flags["peer"] is not None:
        peer_key = flags["peer_api_key"]
        targets.append(Target.parse(flags["peer"], peer_key if peer_key is not None else flags["api_key"]))
    elif flags["peer_model"] is not None or flags["peer_api_key"] is not None:
        raise BadPlan("--peer-model and --peer-api-key are of a --peer, and there is none")
    return targets


def _rounds(flags: Mapping[str, Any]) -> int:
    rounds = _number(flags, "rounds", int)
    if rounds is None:
        return 3 if flags["peer"] is not None else 1
    if not 1 <= rounds <= _MOST_ROUNDS:
        raise BadPlan(f"--rounds: a number from 1 to {_MOST_ROUNDS}, not {rounds}")
    return int(rounds)


def _number(flags: Mapping[str, Any], name: str, kind: type[int | float]) -> Any:
    text = flags[name]
    if text is None:
        return None
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise BadPlan(f"--{name.replace('_', '-')}: {what}, not {text!r}") from None


def _fields(given: Sequence[str]) -> dict[str, Any]:
    """``KEY=JSON``; what is no JSON is taken as a string."""
    found: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise BadPlan(f"--field: KEY=VALUE, not {text!r}")
        try:
            found[key] = msgspec.json.decode(value)
        except (msgspec.MsgspecError, RecursionError):
            found[key] = value
    return found


def _open(flags: Mapping[str, Any], option: str, opened: contextlib.ExitStack) -> TextIO | None:
    """Before anything is measured, so that a measurement is not lost to a folder that is not there."""
    name = flags[option]
    if name is None:
        return None
    if name == "-":
        return sys.stdout
    try:
        return opened.enter_context(Path(name).open("w", encoding="utf-8", newline=""))
    except OSError as error:
        raise BadPlan(f"--{option}: {name}: {error.strerror}") from None


def _allow_descriptors() -> None:
    """An open loop holds as many connections as requests are waiting."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS says infinity and means less
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
