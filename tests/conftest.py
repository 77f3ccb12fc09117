"""For all tests: what pytest itself needs."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

# Where an environment says that no bytecode is to be kept (containers' do), each of the hundreds of servers and commands that
# tests start would compile the whole package anew, and each run the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Make captured output fit to travel between processes: tests log unpaired surrogates, which no UTF-8 holds."""
    outcome: Any = yield
    report = outcome.get_result()
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]


def pytest_collection_finish() -> None:
    """What thousands of collected tests are made of stays to the end: no search for garbage need go through it again."""
    gc.freeze()


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """What one test makes of the log's form and level (a command that runs in its process does) is no other's business."""
    root, ours = logging.getLogger(), logging.getLogger("slimproc")
    before = list(root.handlers), root.level, ours.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])
