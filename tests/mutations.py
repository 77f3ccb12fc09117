"""Which tests notice when the server loses one of its two main virtues? Run by hand: ``python tests/mutations.py``.

Each mutation is made in a temporary copy of the tree; the tests run there. It is not part of the suite: it says what the
suite is worth. The list that it printed last is in docs/testing.md.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 900.0
"""Seconds for the tests of one mutation; a test that hangs counts as one that fails."""


class Mutation(NamedTuple):
    """``file`` with ``old``, which must be there once, replaced by ``new``; ``tests`` are expected to notice."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "token handling blocks the event loop (30 ms a step)",
        "slimproc/replicas/incarnation.py",
        "        streams = self._streams\n        at_ns = step.at_ns\n",
        "        time.sleep(0.03)\n        streams = self._streams\n        at_ns = step.at_ns\n",
        (
            "tests/e2e/test_blocking.py",
            "tests/e2e/test_health.py",
            "tests/e2e/test_streaming.py::test_thirty_streams_at_once_all_come_to_their_end",
        ),
    ),
    Mutation(
        "the cancellation check is removed (the engine ignores Cancel)",
        "slimproc/engines/loop.py",
        "        sequence = self._sequences.pop(rid, None)\n        if sequence is not None:\n",
        "        return\n        sequence = self._sequences.pop(rid, None)\n        if sequence is not None:\n",
        ("tests/e2e/test_cancellation.py", "tests/e2e/test_deadlines.py", "tests/e2e/test_slow_readers.py"),
    ),
)


def mutate(mutation: Mutation, tree: Path) -> None:
    file = tree / mutation.file
    source = file.read_text()
    assert source.count(mutation.old) == 1, f"{mutation.file} has changed: this mutation no longer fits it"
    file.write_text(source.replace(mutation.old, mutation.new))


def failures(tests: tuple[str, ...], tree: Path) -> list[str]:
    """The tests that fail in ``tree``, without their parameters."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-rfE", "--tb=no", "--timeout=40", *tests]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "TEST_LIMIT": "6"},  # the servers that tests start are mutated, too
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    lines = (re.match(r"(?:FAILED|ERROR) ([^\s\[]+)", line) for line in done.stdout.splitlines())
    return sorted({found[1] for found in lines if found})


def main(wanted: list[str]) -> int:
    """Print, for each mutation, the tests that noticed. The exit status is 1 when one went unnoticed."""
    unnoticed = 0
    for mutation in MUTATIONS:
        if wanted and not any(word in mutation.name for word in wanted):
            continue
        with tempfile.TemporaryDirectory() as directory:
            tree = Path(directory) / "tree"
            for part in ("slimproc", "tests", "pyproject.toml"):
                copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
                tree.mkdir(exist_ok=True)
                copy(ROOT / part, tree / part)
            if broken := failures(mutation.tests, tree):
                sys.exit(f"these fail as it is, and so say nothing: {', '.join(broken)}")
            mutate(mutation, tree)
            failed = failures(mutation.tests, tree)
        print(f"{mutation.name}: {len(failed)} tests fail")
        for test in failed:
            print(f"  {test}")
        unnoticed += not failed
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
