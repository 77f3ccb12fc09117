"""The pages of the documentation, and the blocks of commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "benchmarks", "systemd")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.md"))])

LANGUAGES = {"sh", "python", "yaml", "ini", "json", "mermaid", ""}


@dataclass(frozen=True)
class Block:
    """``python``: one example; else commands of a shell."""

    page: str
    line: int
    commands: tuple[str, ...]
    python: bool = False

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(file: Path) -> Iterator[Block]:
    """Fenced ones in ``sh`` or ``python``, fenced ones with a prompt, and indented ones that begin with a program."""
    page, lines = str(file.relative_to(ROOT)), file.read_text("utf-8").splitlines()
    at = 0
    while at < len(lines):
        begin = at + 1
        if lines[at].startswith("```"):
            language = lines[at].removeprefix("```")
            assert language in LANGUAGES, f"{page}:{begin}: shell commands are told by ```sh"
            end = lines.index("```", begin)
            inside = lines[begin:end]
            if language == "python":
                yield Block(page, begin, ("\n".join(inside),), python=True)
            elif language == "sh":
                yield Block(page, begin, tuple(commands_of(inside)))
            elif shown := [line.removeprefix("$ ") for line in inside if line.startswith("$ ")]:
                yield Block(page, begin, tuple(commands_of(shown)))
            at = end + 1
        elif re.match(r"    [\w./-]+ ", lines[at]) and not lines[at - 1].strip():
            end = next((later for later in range(at, len(lines)) if not lines[later].startswith("    ")), len(lines))
            yield Block(page, begin, tuple(commands_of(line[4:] for line in lines[at:end])))
            at = end
        else:
            at += 1


def commands_of(lines: Iterable[str]) -> Iterator[str]:
    """Each with the lines that belong to it: quotes that are open, and ends that are escaped."""
    so_far = ""
    for line in lines:
        so_far += line + "\n"
        if line.endswith("\\") or not _is_whole(so_far):
            continue
        if so_far.strip() and not so_far.lstrip().startswith("#"):
            yield so_far.strip()
        so_far = ""
    assert not so_far.strip(), f"a command without its end: {so_far}"


def _is_whole(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True
