"""For all tests: what pytest itself needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Make captured output fit to travel between processes: tests log unpaired surrogates, which no UTF-8 holds."""
    outcome: Any = yield
    report = outcome.get_result()
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
