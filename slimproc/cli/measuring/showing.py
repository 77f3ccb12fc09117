"""What people see of a measurement, all on stderr: a bar on a terminal, else a line a stage; and a table a round."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from slimproc.cli.measuring.profile import Measured, Round
from slimproc.cli.output import make_table

STAGES: Final = ("settling", "loading", "serving", "unloading")


class Progress:
    """A context, within which stages are told one after the other."""

    def __init__(self, model: str, rounds: int) -> None:
        self._model = model
        self._rounds = rounds
        self._console = Console(stderr=True, markup=False, emoji=False, highlight=False)
        self._bars: Bars | None = None
        self._done = 0.0
        self._title = ""

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.fields[said]}", markup=False),
                TimeElapsedColumn(),
            )
            self._bars = Bars(*columns, console=self._console, refresh_per_second=4)
            self._task = self._bars.add_task(self._model, total=float(self._rounds * len(STAGES)), said="")
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def stage(self, number: int, stage: str) -> None:
        """A stage of round ``number`` (from 1) begins."""
        self._title = f"{self._model}, round {number} of {self._rounds}: {stage}"
        self._done = float((number - 1) * len(STAGES) + STAGES.index(stage))
        if self._bars is None:
            self.say(self._title)
        else:
            self._bars.update(self._task, description=self._title, completed=self._done, said="")
            self._bars.refresh()  # also one that is over in no time

    def tick(self, size: int, share: float = 0.0) -> None:
        """The stage's peak so far, and how much of it is done."""
        if self._bars is not None:
            self._bars.update(self._task, completed=self._done + min(share, 1.0), said=mib(size))

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def show(self, one: Round) -> None:
        self._console.print(make_table((f"round {one.number}", "bytes", "", "seconds"), _rows(one)))


def _rows(one: Round) -> Iterator[tuple[str, ...]]:
    for name, peak in (("peak of the load", one.load), ("peak of the requests", one.run)):
        yield name, str(peak.bytes), mib(peak.bytes), f"{peak.seconds:.1f}"
    if mapped := max(one.load.mapped, one.run.mapped):
        yield "mapped files in memory", str(mapped), mib(mapped), ""
    yield "left after the unload", str(one.residual), mib(one.residual), ""


def notes(measured: Measured, headroom: float, *, small: bool) -> Iterator[str]:
    """What has to be known to judge the numbers."""
    yield f"on {measured.device} ({measured.hardware}), {measured.concurrency} at once; {headroom:g} % on top of the peaks"
    if measured.file is not None:
        yield (
            f"the file {measured.file} is mapped: its {measured.file_bytes} bytes count once for all who map it, and are "
            "not part of the peaks"
        )
    if measured.whole:
        yield (
            "the peaks are what the whole device had in use above its state without the model: an upper bound, if others "
            "use it, too"
        )
    if small:
        yield "the requests had a small body of ours: with --body, measure what the largest of your callers send"
    if not max(max(one.load.bytes, one.run.bytes) for one in measured.rounds):
        yield f"nothing was taken of {measured.device}: is the model on another machine, or on another device?"


def mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
