"""For all tests: what pytest itself needs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Make captured output fit to travel between processes: tests log unpaired surrogates, which no UTF-8 holds."""
    outcome: Any = yield
    report = outcome.get_result()
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """What one test makes of the log's form and level (a command that runs in its process does) is no other's business."""
    root, ours = logging.getLogger(), logging.getLogger("slimproc")
    before = list(root.handlers), root.level, ours.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])
