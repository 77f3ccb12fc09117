"""``slimproc import``: another program's configuration as one of ours, and what was lost on the way."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from slimproc.cli.configuration import typed_path
from slimproc.cli.importing import inferswap, llama_swap
from slimproc.cli.importing.fields import Fields, Notes
from slimproc.cli.importing.foreign_yaml import read_foreign
from slimproc.cli.importing.writing import written
from slimproc.config import load_config
from slimproc.config.yaml_source import text_of
from slimproc.errors import EX_CONFIG, ConfigError

_OURS = ("backend", "remote", "command")


def import_config(file: str, to: str | None) -> int:
    """Write the configuration to ``to``, which must not be there yet, or to stdout; what is to be known, to stderr.

    Returns the process's status: nothing is written unless it would load (its models may still have to be measured).
    """
    try:
        text, notes = translate(typed_path(file), os.environ)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EX_CONFIG
    if to is None:
        sys.stdout.write(text)
    else:
        try:
            with Path(to).open("x", encoding="utf-8") as out:
                out.write(text)
        except OSError as error:
            print(f"slimproc: cannot write {to}: {error.strerror}", file=sys.stderr)
            return 1
    for note in notes:
        print(note, file=sys.stderr)
    return 0


def translate(file: Path, environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """The text of a configuration of ours, and the notes that stand at its top. Raises ConfigError."""
    theirs, notes = text_of(file), Notes()
    try:
        top = Fields("", read_foreign(theirs), notes)
        program = _program(top)
        settings = inferswap.translate(top) if program == "InferSwap" else llama_swap.translate(top, environ)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    text = written(settings, f"Made by `slimproc import` from a configuration of {program}.", notes.lines)
    _check(text, file)
    return text, notes.lines


def _program(top: Fields) -> str:
    """Whose configuration it is. Raises ConfigError where that cannot be told."""
    keys: set[str] = set()
    for _, model in top.named("models", take=False):
        keys |= model.given
    theirs = {
        "llama-swap": "cmd" in keys,
        "InferSwap": bool(keys & {"baseURL", "resourceProfile", "inferencePath"}) or "gpu" in top.given,
    }
    found = [program for program, is_it in theirs.items() if is_it]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError("it has models of llama-swap (cmd) and of InferSwap (baseURL)")
    if keys & {*_OURS}:
        raise ConfigError("this is a configuration of slimproc already")
    raise ConfigError("wanted a configuration of InferSwap (models with baseURL) or of llama-swap (models with cmd)")


def _check(text: str, file: Path) -> None:
    """What was made must load. Raises ConfigError with what is wrong with it, in our words."""
    with tempfile.TemporaryDirectory(prefix="slimproc-import-") as directory:
        made = Path(directory) / "made.yaml"
        made.write_text(text, "utf-8")
        try:
            load_config(made, flags={}, environ={}, dotenv=None, unmeasured=True)
        except ConfigError as error:
            problems = [problem.removeprefix(f"{made}:").partition(": ")[2] for problem in str(error).splitlines()]
            lines = [f"{file}: cannot be carried over: {problem}" for problem in problems]
            raise ConfigError("\n".join(lines)) from None
