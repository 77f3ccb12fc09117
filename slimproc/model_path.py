"""Finds the file or directory that a model's ``path`` means, on this machine and without any network.

Besides the configuration it is the one place that looks at the environment: the Hugging Face cache is where HF_HUB_CACHE,
HF_HOME, XDG_CACHE_HOME or HOME say, as for every program that shares it.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import NoReturn

from slimproc.errors import LoadFailed

_REPOSITORY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_COMMIT = re.compile(r"[0-9A-Za-z._-]+")
_SHOWN = 200
"""Characters of a path that stands in a message."""


def resolve(spec: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The existing file or directory of a path, ``package:NAME/FILE`` or ``hf:ORG/NAME[/FILE]``.

    Raises LoadFailed (permanent) with one line naming ``spec`` and what was looked for.
    """
    if spec.startswith("package:"):
        return _in_package(spec)
    if spec.startswith("hf:"):
        return _in_hub_cache(spec, environ)
    try:
        path = Path(spec).expanduser()
    except RuntimeError:
        _fail(spec, "there is no such home directory")
    place = "of that name" if str(path) == spec[:_SHOWN] else path
    return _existing(spec, path, f"there is no file or directory {place}")


def _in_package(spec: str) -> Path:
    """A file that an installed package brings. The package is found and not imported: its code never runs here."""
    name, _, rest = spec.removeprefix("package:").partition("/")
    if not name.isidentifier() or not _inside(rest):
        _fail(spec, "wanted package:NAME/FILE")
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None or not found.submodule_search_locations:
        _fail(spec, f"the package {name} is not installed (pip install {name.replace('_', '-')})")
    folders = [Path(folder) for folder in found.submodule_search_locations]
    path = next((folder / rest for folder in folders if (folder / rest).exists()), folders[0] / rest)
    return _existing(spec, path, f"there is no {rest} in {', '.join(map(str, folders))}")


def _in_hub_cache(spec: str, environ: Mapping[str, str]) -> Path:
    """A repository's snapshot, or a file of it: models--ORG--NAME/refs/main names the folder in snapshots/."""
    organisation, _, rest = spec.removeprefix("hf:").partition("/")
    name, _, file = rest.partition("/")
    named = all(_REPOSITORY.fullmatch(part) and ".." not in part for part in (organisation, name))
    if not named or (file and not _inside(file)) or rest.endswith("/"):
        _fail(spec, "wanted hf:ORG/NAME or hf:ORG/NAME/FILE")
    repository = _hub_cache(environ) / f"models--{organisation}--{name}"
    advice = f"download it first: hf download {organisation}/{name}{' ' + file if file else ''}"
    try:
        commit = (repository / "refs" / "main").read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        _fail(spec, f"there is no {repository / 'refs' / 'main'}; {advice}")
    if not _COMMIT.fullmatch(commit) or commit in (".", ".."):
        _fail(spec, f"{repository / 'refs' / 'main'} does not hold a commit; {advice}")
    path = repository / "snapshots" / commit / file
    return _existing(spec, path, f"there is no {path}; {advice}")


def _hub_cache(environ: Mapping[str, str]) -> Path:
    """As huggingface_hub finds it."""
    if cache := environ.get("HF_HUB_CACHE"):
        return _expanded(cache, environ)
    if hub_home := environ.get("HF_HOME"):
        return _expanded(hub_home, environ) / "hub"
    if cache := environ.get("XDG_CACHE_HOME"):
        return _expanded(cache, environ) / "huggingface" / "hub"
    return _expanded("~/.cache/huggingface/hub", environ)


def _expanded(text: str, environ: Mapping[str, str]) -> Path:
    if (text == "~" or text.startswith("~/")) and (home := environ.get("HOME")):
        return Path(home) / text[2:]
    return Path(text).expanduser()


def _inside(file: str) -> bool:
    """A relative path that stays below where it starts."""
    return bool(file) and "\0" not in file and not file.startswith("/") and ".." not in PurePosixPath(file).parts


def _existing(spec: str, path: Path, otherwise: str) -> Path:
    try:
        exists = path.exists()
    except (OSError, ValueError) as error:  # no permission to look, a name too long, a NUL in it
        reason = error.strerror if isinstance(error, OSError) else str(error)
        _fail(spec, f"cannot look at {path!s}: {reason}")
    if not exists:
        _fail(spec, _dangling(path) or otherwise)
    return path


def _dangling(path: Path) -> str | None:
    """What is wrong with a symbolic link that leads nowhere; None for what is no link."""
    if not path.is_symlink():
        return None
    try:
        path.resolve(strict=True)
    except RuntimeError:
        return f"{path} is a symbolic link that leads to itself"
    except OSError:
        pass
    return f"{path} is a symbolic link to {path.readlink()}, which is not there"


def _fail(spec: str, reason: str) -> NoReturn:
    shown = spec if len(spec) <= _SHOWN else spec[: _SHOWN - 1] + "…"
    raise LoadFailed(f"cannot find model {shown!r}: {reason}", permanent=True)
