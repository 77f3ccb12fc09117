"""The progress bar of ``slimproc bench``: on a terminal only, and drawn four times a second, since the client is measuring."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from slimproc.bench.benchmark import Side
from slimproc.bench.drive import Drive

_EVERY: Final = 0.25


class Progress:
    """A context within which bars are drawn, one for each server in each round. Nothing where stderr is no terminal."""

    def __init__(self, sides: Sequence[Side], rounds: int) -> None:
        self._labels = [side.target.url for side in sides]
        self._rounds = rounds
        self._bars: Bars | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[said]}"),
                TimeElapsedColumn(),
            )
            self._bars = Bars(*columns, console=Console(stderr=True), auto_refresh=False)
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._bars is not None:
            self._bars.refresh()
            self._bars.stop()

    def watch(self, drive: Drive, side: int, number: int) -> None:
        if self._bars is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        label = self._labels[side] + (f", round {number + 1} of {self._rounds}" if self._rounds > 1 else "")
        task = self._bars.add_task(label, said="", total=1.0)
        self._draw(drive, task)

    def _draw(self, drive: Drive, task: TaskID) -> None:
        assert self._bars is not None
        done, total = drive.progress()
        said = f"{len(drive.samples)} done, {drive.running} running"
        self._bars.update(task, completed=done, total=total, said=said)
        self._bars.refresh()
        self._timer = asyncio.get_running_loop().call_later(_EVERY, self._draw, drive, task)
