"""Puts what was measured into the configuration's file: only if it loads then, and means the same in all else."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from slimproc.cli.configuration import read
from slimproc.cli.measuring.edit import CannotEdit, with_memory
from slimproc.config import Config, MemoryProfile
from slimproc.errors import ConfigError

_TRIAL = MemoryProfile(load_peak=1, inference_peak=1, residual=0, max_concurrency=4096, profile_id="a trial")


def check(file: Path, model: str) -> None:
    """Raise CannotEdit now where ``rewrite`` would raise it after all the work. Nothing is left of the trial."""
    _edited(file, model, _TRIAL)
    folder = file.resolve().parent
    if not os.access(folder, os.W_OK):
        raise CannotEdit(f"{folder}: nothing can be written here")


def rewrite(file: Path, model: str, memory: MemoryProfile) -> None:
    """Replace the file, at once and whole. Raises CannotEdit, and then it is as it was."""
    data = _edited(file, model, memory)
    target = file.resolve()  # a link stays a link
    try:
        with _beside(target, data) as made:
            os.chmod(made, stat.S_IMODE(target.stat().st_mode))  # noqa: PTH101 - the name is a string already
            os.replace(made, target)  # noqa: PTH105
    except OSError as error:
        raise CannotEdit(f"{target}: it cannot be written: {error.strerror}") from None


def _edited(file: Path, model: str, memory: MemoryProfile) -> bytes:
    """The new file. Raises CannotEdit unless it loads and differs in the model's memory alone."""
    try:
        _, before = read({"config": str(file)}, unmeasured=True)
        data = with_memory(file.read_bytes().decode("utf-8"), model, memory).encode()
        with _beside(file, data) as made:  # in the same folder: relative paths in it start there
            _, after = read({"config": made}, unmeasured=True)
    except ConfigError as error:
        raise CannotEdit(f"{file}: the configuration would be wrong with it: {error}") from None
    except OSError as error:
        raise CannotEdit(f"{file}: it cannot be changed: {error.strerror}") from None
    except CannotEdit as error:
        raise CannotEdit(f"{file}: {error}") from None
    if model not in before.models or _meaning(after) != _meaning(_with(before, model, memory)):
        raise CannotEdit(f"{file}: more than {model}'s memory would change")
    return data


def _with(config: Config, model: str, memory: MemoryProfile) -> Config:
    measured = msgspec.structs.replace(config.models[model], memory=memory)
    return msgspec.structs.replace(config, models=config.models | {model: measured})


def _meaning(config: Config) -> Config:
    """Without where it was written."""
    models = {name: msgspec.structs.replace(model, origins={}) for name, model in config.models.items()}
    return msgspec.structs.replace(config, models=models, origins={})


@contextlib.contextmanager
def _beside(file: Path, data: bytes) -> Iterator[str]:
    """A file of that content in the same folder, which is gone in the end unless it was moved."""
    descriptor, name = tempfile.mkstemp(dir=file.absolute().parent, prefix=f".{file.name}.", suffix=".new")
    try:
        with os.fdopen(descriptor, "wb") as made:
            made.write(data)
            made.flush()
            os.fsync(made.fileno())
        yield name
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)  # noqa: PTH108
