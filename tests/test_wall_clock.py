"""The wall clock is read only for what people and other programs are told; whatever is timed goes by the monotonic one.

An operator sets the wall clock, NTP moves it, and a machine that slept finds it hours further: an age, a limit or a rate
taken from it would end everything at once, or never. Those who may read it: the gateway (``created`` of a model), answers
(``created``), the list of devices (``observed_at``), chat templates (``strftime_now``: many a model is told the date), and
what ``slimproc measure`` writes (its date). Lines of the log have the time that ``logging`` puts into each record.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import slimproc

ROOT = Path(slimproc.__file__).parent
READERS = {
    "http/gateway.py",
    "http/openai/format.py",
    "http/openai/models.py",
    "chat/sandbox.py",
    "cli/measuring/profile.py",
}
_OF_TIME = {"time", "time_ns", "clock_gettime", "clock_gettime_ns"}
_OF_DATES = {"now", "utcnow", "today"}
_GIVEN_A_TIME = {"strftime": 2, "localtime": 1, "gmtime": 1, "ctime": 1, "asctime": 1}
"""How many arguments these functions have when they are not about the present."""


def reads(node: ast.AST) -> bool:
    """Whether it reads the wall clock, or hands on a function that does."""
    match node:
        case ast.Attribute(value=ast.Name(id="time"), attr=name):
            return name in _OF_TIME
        case ast.Attribute(value=ast.Name(id="datetime" | "date") | ast.Attribute(attr="datetime" | "date"), attr=name):
            return name in _OF_DATES
        case ast.Call(func=ast.Attribute(value=ast.Name(id="time"), attr=name), args=arguments):
            return len(arguments) < _GIVEN_A_TIME.get(name, 0)
        case ast.ImportFrom(module="time", names=names):
            return bool({alias.name for alias in names} & {*_OF_TIME, *_GIVEN_A_TIME})
        case ast.Import(names=names):  # by another name nobody would find it here
            return any(alias.name == "time" and alias.asname for alias in names)
    return False


def wall_clock(source: str) -> bool:
    return any(map(reads, ast.walk(ast.parse(source))))


def test_the_wall_clock_is_read_only_where_somebody_is_told_the_time():
    readers = {
        path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if wall_clock(path.read_text(encoding="utf-8"))
    }
    assert readers == READERS


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("time.time()", True), ("time.time_ns()", True), ("clock = time.time", True), ("datetime.now()", True),
        ("dt.datetime.now(dt.UTC)", True), ("date.today()", True), ("time.strftime('%Y')", True), ("time.gmtime()", True),
        ("from time import time", True), ("import time as t", True), ("time.clock_gettime(time.CLOCK_REALTIME)", True),
        ("time.monotonic()", False), ("loop.time()", False), ("asyncio.get_running_loop().time()", False),
        ("self.loop.time()", False), ("time.strftime('%Y', then)", False), ("from time import perf_counter", False),
    ],
)  # fmt: skip
def test_such_a_reading_is_found(source, found):
    assert wall_clock(source) is found
