"""``slimproc chaos``: flags become a plan, the plan is run against a server of its own, and what came of it is shown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from rich.console import Console
from rich.table import Table

from slimproc.chaos.builtin import BROKEN, builtin
from slimproc.chaos.failures import BadRun, ServerFailed
from slimproc.chaos.report import ends, report_of
from slimproc.chaos.run import Plan, Run, run_once
from slimproc.chaos.schedule import Target
from slimproc.cli.configuration import typed_path
from slimproc.config import Config, ModelConfig, load_config
from slimproc.errors import ConfigError
from slimproc.settings import BACKENDS, BackendTraits

_LINE_EVERY: Final = 5.0
_SHOWN: Final = 20


def chaos(flags: Mapping[str, str | None]) -> int:
    """Status 0: nothing was violated. 1: something was, or the server did not come up. 2: the flags or the configuration
    make no sense.
    """
    if os.name != "posix":
        print("slimproc chaos: only on Unix", file=sys.stderr)
        return 2
    try:
        report = _report_file(flags["report"])
        with tempfile.TemporaryDirectory(prefix="slimproc-chaos-", ignore_cleanup_errors=True) as folder:
            file = _config_file(flags["config"], Path(folder))
            plan = _plan(flags, load_config(file, flags={}, environ=os.environ, dotenv=Path(".env")))
            run = asyncio.run(_run(plan, file, Path(folder)))
    except (BadRun, ConfigError) as error:
        print(f"slimproc chaos: {error}", file=sys.stderr)
        return 2
    except ServerFailed as error:
        print(f"slimproc chaos: {error}", file=sys.stderr)
        return 1
    _show(run)
    if report is not None:
        report.write_text(json.dumps(report_of(run), indent=1) + "\n")
    return 1 if run.violations else 0


async def _run(plan: Plan, file: Path, folder: Path) -> Run:
    lines: list[asyncio.Task[None]] = []

    def watch(run: Run) -> None:
        lines.append(asyncio.create_task(_progress(run)))
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, run.stop)

    try:
        return await run_once(plan, file, folder, watch)
    finally:
        for line in lines:
            line.cancel()


async def _progress(run: Run) -> None:
    """A line now and then, on stderr."""
    while True:
        await asyncio.sleep(_LINE_EVERY)
        print(
            f"{run.elapsed:5.0f} s  {len(run.told)} requests  {run.breaker.done.total()} faults  "
            f"{len(run.violations)} violations",
            file=sys.stderr,
            flush=True,
        )


def _show(run: Run) -> None:
    table = Table("", "", "count", title=f"seed {run.plan.seed}, {run.elapsed:.0f} s", title_justify="left")
    for end, number in sorted(ends(run).items()):
        table.add_row("ended", end, str(number))
    for kind, number in sorted(run.breaker.done.items()):
        table.add_row("fault", kind, str(number))
    table.add_row("violations", "", str(len(run.violations)))
    console = Console()
    console.print(table)
    for one in run.violations[:_SHOWN]:
        print(f"{one.at:7.2f} s  {one.request or '-'}  {one.rule}: {one.what}")
        for line in one.log:
            print(f"           {line}")
    if len(run.violations) > _SHOWN:
        print(f"and {len(run.violations) - _SHOWN} more: --report FILE has them all")


def _plan(flags: Mapping[str, str | None], config: Config) -> Plan:
    models = [model for model in config.models.values() if model.backend is not None]
    if not models:
        raise BadRun("--config: no model in it has a backend, and only such models can be asked and broken")
    limits = [max(model.request_timeout, model.load_timeout) for model in models]
    return Plan(
        seed=_number(flags, "seed", 0, 0, 2**63, kind=int),
        duration=60 * _number(flags, "minutes", 1.0, 0.05, 24 * 60),
        targets=[
            Target(model.name, scripted=_traits(model).scripted, generates=model.pooling is None) for model in models
        ],
        claims={
            model.name: model.fake.bytes
            for model in models
            if _traits(model).declares_bytes and model.fake.bytes and model.memory is None and model.name != BROKEN
        },
        clients=_number(flags, "clients", 16, 1, 1000, kind=int),
        fault_every=_number(flags, "fault_every", 5.0, 0.1, 3600),
        answer_limit=max(limits) + 60,
        stop_limit=config.shutdown_timeout + 30,
    )


def _traits(model: ModelConfig) -> BackendTraits:
    assert model.backend is not None, "only models with a backend are broken"
    return BACKENDS[model.backend]


def _number(
    flags: Mapping[str, str | None], name: str, usual: Any, least: float, most: float, *, kind: Any = float
) -> Any:
    text = flags[name]
    if text is None:
        return usual
    with contextlib.suppress(ValueError):
        value = kind(text)
        if least <= value <= most:
            return value
    what = "a whole number" if kind is int else "a number"
    raise BadRun(f"--{name.replace('_', '-')}: {what} from {least:g} to {most:g}, not {text!r}")


def _config_file(given: str | None, folder: Path) -> Path:
    if given is not None:
        return typed_path(given).resolve()
    file = folder / "slimproc.yaml"
    file.write_text(yaml.safe_dump(builtin(), sort_keys=False))
    return file


def _report_file(given: str | None) -> Path | None:
    """Before anything is run, so that a report is not lost to a folder that is not there."""
    if given is None:
        return None
    file = Path(given)
    try:
        file.write_text("")
    except OSError as error:
        raise BadRun(f"--report: {given}: {error.strerror}") from None
    return file
